"""Several pools behind one port: each with pods, scheduling and queues of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import yaml

from proxy.app import App
from proxy.core.endpoint import update
from proxy.core.errors import ConfigError
from proxy.lab.sim import SimConfig, SimFleet
from proxy.lab.sim.config import Role
from proxy.settings import Settings, from_mapping
from tests.helpers.scenarios.disagg import PROMPT, SCHEDULING
from tests.helpers.scenarios.stack import CHAT, ResponseAndBody, Stack
from tests.helpers.waiting import until

SMALL = SimConfig(model="small", time_scale=20)
LARGE = SimConfig(model="large", time_scale=20)
SLOW = SimConfig(model="small", time_scale=1)

NAMED = "x-kvlane-endpoint"

ONLY_GOLD = {
    "plugins": [
        {"type": "label-selector-filter", "name": "gold", "parameters": {"matchLabels": {"tier": "gold"}}},
        {"type": "queue-scorer"},
    ],
    "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "gold"}, {"pluginRef": "queue-scorer"}]}],
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The first `here` pods are in the default pool, the others in `large`."""

    urls: Sequence[str]
    here: int

    def settings(self, **sections: Any) -> Settings:
        return from_mapping(self.given(**sections))

    def given(self, pods: Mapping[str, Any] | None = None, large: Any = None, **sections: Any) -> dict[str, Any]:
        """`large` has further sections of the pool; the pool is left out if it is False."""
        given = {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "pods": {"static": self.static(*range(self.here)), **(pods or {})},
            "telemetry": {"accessLog": False},
            **sections,
        }
        if large is not False:
            own = {"static": self.static(*range(self.here, len(self.urls)))}
            given["pools"] = {"large": {"pods": own, **(large or {})}}
        return given

    def static(self, *numbers: int, **more: Any) -> list[dict[str, Any]]:
        return [{"url": self.urls[number], "name": f"pod-{number}", **more} for number in numbers]


@dataclass(frozen=True, slots=True)
class Pooled(Stack):
    plan: Plan

    async def ask(self, model: str, text: str = "Hello!", tokens: int = 4) -> ResponseAndBody:
        return await self.chat(text, model=model, max_tokens=tokens, ignore_eos=True)

    async def pods_used(self, model: str, times: int = 8) -> set[str]:
        """The pods that have responded."""
        responses = await asyncio.gather(*(self.ask(model, f"question {number}") for number in range(times)))
        assert [body for response, body in responses if response.status != 200] == []
        return {response.headers[NAMED] for response, _ in responses}

    def waiting(self, pool: str) -> int:
        return self.app.serving.flow_controls[pool].queue.length

    async def reload(self, **sections: Any) -> None:
        await self.app.reload(self.plan.settings(**sections))


@asynccontextmanager
async def pools(*configs: SimConfig, here: int, **given: Any) -> AsyncIterator[Pooled]:
    async with SimFleet(len(configs), configs) as sim, aiohttp.ClientSession() as http:
        plan = Plan(sim.urls, here)
        async with App(plan.settings(**given)) as app:
            yield Pooled(app, sim, http, plan)


async def test_a_request_goes_to_the_pool_of_its_model_and_an_unknown_model_to_none() -> None:
    async with pools(SMALL, LARGE, LARGE, here=1) as s:
        assert await s.pods_used("small") == {"pod-0"}
        assert await s.pods_used("large") == {"pod-1", "pod-2"}
        response, body = await s.ask("none")
        assert (response.status, body["error"]["code"]) == (404, "model_not_found")
        async with s.http.get(s.url + "/v1/models") as listed:
            assert {card["id"] for card in (await listed.json())["data"]} == {"small", "large"}
        await s.idle()


async def test_each_pool_has_its_own_scheduling() -> None:
    async with pools(SMALL, SMALL, LARGE, LARGE, here=2) as s:
        gold = [*s.plan.static(2), *s.plan.static(3, labels={"tier": "gold"})]
        await s.reload(large={"pods": {"static": gold}, "scheduling": ONLY_GOLD})
        assert await s.pods_used("large") == {"pod-3"}
        assert await s.pods_used("small") == {"pod-0", "pod-1"}
        assert "gold" not in s.app.schedulings["default"].instances


async def test_each_pool_has_its_own_connector() -> None:
    """What a pool does not say, the top level does."""
    roles: list[Role] = ["prefill", "decode"]
    nixl = [SimConfig(model="small", time_scale=20, role=role, connector="nixl") for role in roles]
    mooncake = [SimConfig(model="large", time_scale=20, role=role, connector="mooncake") for role in roles]
    own = {"scheduling": SCHEDULING, "disaggregation": {"connector": "mooncake"}}
    async with pools(*nixl, *mooncake, here=2) as s:
        here, large = ([*s.plan.static(n, role="prefill"), *s.plan.static(n + 1, role="decode")] for n in (0, 2))
        top = {"disaggregation": {"prefillTimeout": "7s"}, "scheduling": SCHEDULING}
        await s.reload(pods={"static": here}, large={"pods": {"static": large}, **own}, **top)
        for model in ("small", "large"):
            assert (await s.ask(model, PROMPT))[0].status == 200
        assert [sum(pod.engine.stats.transfers for pod in pods) for pods in (s.pods[:2], s.pods[2:])] == [1, 1]
        timeouts = [
            pool.split_requests.prefill_timeout for pool in s.app.serving.gateway.all_pools if pool.split_requests
        ]
        assert timeouts == [7.0, 7.0]


async def test_a_flood_on_one_pool_does_not_delay_the_other() -> None:
    one_at_a_time = {"maxConcurrent": 1}
    async with pools(SLOW, LARGE, here=1, flowControl=one_at_a_time, large={"flowControl": one_at_a_time}) as s:
        flood = [asyncio.ensure_future(s.ask("small", tokens=50)) for _ in range(12)]
        await until(lambda: s.waiting("default") == 11)
        assert [(await s.ask("large"))[0].status for _ in range(3)] == [200] * 3
        assert s.waiting("default") >= 8
        assert (await s.sample('kvlane_queue_requests{band="0",pool="default"}') or 0) >= 8
        assert await s.sample('kvlane_queue_requests{band="0",pool="large"}') == 0
        assert await s.sample('kvlane_queue_wait_seconds_count{band="0",pool="large"}') == 3
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        await s.idle()


async def test_of_two_pools_with_the_model_the_first_serves_it_until_its_pods_are_gone() -> None:
    async with pools(SMALL, SMALL, here=1) as s:
        assert await s.pods_used("small") == {"pod-0"}
        await s.pods[0].kill()
        assert await s.pods_used("small") == {"pod-1"}
        await s.idle()


async def test_a_pool_that_lists_the_model_precedes_one_without_a_list() -> None:
    async with pools(SMALL, LARGE, here=1) as s:
        update(s.app.fleet.endpoints[0], models=None)
        s.app.fleet._serving = None
        assert await s.pods_used("large") == {"pod-1"}


async def test_a_fallback_can_be_the_same_model_in_another_pool() -> None:
    full = {"maxConcurrent": 1, "maxQueued": 0}
    models = {"fallbacks": {"small": ["small@large"]}}
    async with pools(SLOW, SMALL, here=1, flowControl=full, models=models) as s:
        first = asyncio.ensure_future(s.ask("small", tokens=50))
        await until(lambda: bool(s.app.ledger.in_flight))
        response, _ = await s.ask("small")
        assert (response.status, response.headers[NAMED]) == (200, "pod-1")
        assert await s.sample('kvlane_model_fallbacks_total{model="small",to="small@large"}') == 1
        assert (await first)[0].headers[NAMED] == "pod-0"


async def test_a_rewrite_to_a_pool_is_served_by_no_other() -> None:
    models = {"rewrites": [{"model": "canary", "targets": [{"model": "small", "pool": "large"}]}]}
    async with pools(SMALL, SMALL, here=1, models=models) as s:
        assert await s.pods_used("canary") == {"pod-1"}
        assert await s.pods_used("small") == {"pod-0"}
        await s.pods[1].kill()
        assert {(await s.ask("canary"))[0].status for _ in range(3)} <= {502, 503}
        assert await s.pods_used("small") == {"pod-0"}


async def test_a_client_cannot_name_a_pool() -> None:
    async with pools(SMALL, SMALL, here=1, models={"fallbacks": {"other": ["small@large"]}}) as s:
        assert (await s.ask("small@large"))[0].status == 404
        body = {"model": "small", "messages": [{"role": "user", "content": "Hi"}]}
        response, _ = await s.post(CHAT, body, {"x-llm-d-model-name-rewrite": "small@large"})
        assert response.status == 404


async def test_a_reload_adds_and_removes_a_pool_and_others_keep_their_state() -> None:
    async with pools(SMALL, LARGE, here=1, large=False) as s:
        assert (await s.ask("large"))[0].status == 404
        before = s.app.schedulings["default"].instances
        await s.reload()
        await until(lambda: len(s.app.fleet.ready) == 2)
        assert await s.pods_used("large") == {"pod-1"}
        assert await s.sample('kvlane_pool_ready_endpoints{pool="large"}') == 1
        after = s.app.schedulings["default"].instances
        assert all(after[name] is before[name] for name in before)
        await s.reload(large=False)
        assert [endpoint.name for endpoint in s.app.fleet.ready] == ["pod-0"]
        assert (await s.ask("large"))[0].status == 503
        await until(lambda: len(s.app.fleet.endpoints) == 1)
        assert await s.pods_used("small") == {"pod-0"}
        assert await s.sample('kvlane_pool_ready_endpoints{pool="large"}') is None


async def test_requests_queued_in_a_removed_pool_go_to_one_with_the_model() -> None:
    full = {"flowControl": {"maxConcurrent": 1}}
    async with pools(SMALL, SLOW, here=1, pods={"static": []}, large=full) as s:
        begun = [asyncio.ensure_future(s.ask("small", tokens=60)) for _ in range(3)]
        await until(lambda: s.waiting("large") == 2)
        await s.reload(pods={"static": []}, large={**full, "flowControl": {"maxConcurrent": 1}})
        assert s.waiting("large") == 2
        moved = s.plan.given(pods={"static": s.plan.static(0)}, large=False)
        await s.app.reload(from_mapping({**moved, "pools": {"large": {**full, "pods": {"static": s.plan.static(1)}}}}))
        await until(lambda: len(s.app.fleet.ready) == 2)
        await s.app.reload(from_mapping(moved))
        responses = await asyncio.gather(*begun)
        assert [response.status for response, _ in responses] == [200] * 3
        assert sorted(response.headers[NAMED] for response, _ in responses) == ["pod-0", "pod-0", "pod-1"]
        assert await s.sample('kvlane_queue_requests{band="0",pool="large"}') is None
        await s.idle()


async def test_a_pod_that_moves_to_another_pool_is_new_there_and_finishes_its_requests() -> None:
    async with pools(SLOW, LARGE, here=1) as s:
        await s.reload(large={"pods": {"static": s.plan.static(1, models=["large"])}})
        running = asyncio.ensure_future(s.ask("small", tokens=60))
        await until(lambda: bool(s.app.ledger.in_flight))
        before = s.app.fleet.get("pod-0")
        for pool, there in (
            ("large", {"pods": {"static": s.plan.static(0, 1)}}),
            ("default", {"pods": {"static": []}}),
        ):
            where = {"static": []} if pool == "large" else {"static": s.plan.static(0, 1)}
            await s.reload(pods=where, large=there)
            assert {endpoint.name: endpoint.pool for endpoint in s.app.fleet.endpoints} == {
                "pod-0": pool,
                "pod-1": pool,
            }
            await until(lambda: len(s.app.fleet.ready) == 2)
            assert await s.pods_used("large") == {"pod-1"}
        assert s.app.fleet.get("pod-0") is not before
        assert (await running)[0].status == 200
        assert not s.app.ledger.in_flight


async def test_a_pod_that_a_reload_removes_serves_until_the_pod_that_replaces_it_is_ready() -> None:
    async with pools(SMALL, SMALL, here=1, large=False) as s:
        await s.reload(pods={"static": s.plan.static(1)}, large=False)
        assert [endpoint.name for endpoint in s.app.fleet.ready] == ["pod-0"]
        await until(lambda: [endpoint.name for endpoint in s.app.fleet.ready] == ["pod-1"])


async def test_a_fault_in_a_pool_changes_nothing_and_is_reported() -> None:
    async with pools(SMALL, LARGE, here=1) as s:
        before = dict(s.app.schedulings)
        body = s.plan.given(
            large={"scheduling": {"plugins": [{"type": "queue-scorerr"}]}, "flowControl": {"maxQueud": 1}}
        )
        response, payload = await s.operate("POST", "/admin/config", body)
        paths = {problem["path"] for problem in payload["error"]["problems"]}
        assert (response.status, paths) == (
            400,
            {"pools.large.scheduling.plugins.queue-scorerr", "pools.large.flowControl"},
        )
        assert dict(s.app.schedulings) == before
        response, payload = await s.operate(
            "POST", "/admin/config", s.plan.given(large={"flowControl": {"maxConcurrent": 5}})
        )
        assert (response.status, payload["changed"]) == (200, ["pools.large.flowControl.maxConcurrent"])
        response, payload = await s.operate("POST", "/admin/config/rollback")
        assert (response.status, payload["changed"]) == (200, ["pools.large.flowControl.maxConcurrent"])
        assert await s.pods_used("large") == {"pod-1"}


async def test_operators_see_pools_and_add_pods_to_them() -> None:
    async with pools(SMALL, LARGE, LARGE, here=1, large={"pods": {"static": []}}) as s:
        _, shown = await s.operate("GET", "/admin/pods")
        assert [(pod["name"], pod["pool"]) for pod in shown["pods"]] == [("pod-0", "default")]
        for number, pool in ((1, "large"), (2, "large")):
            (pod,) = s.plan.static(number)
            response, described = await s.operate("POST", "/admin/pods", {**pod, "pool": pool})
            assert (response.status, described["pool"]) == (201, pool)
        await until(lambda: len(s.app.fleet.ready) == 3)
        assert await s.pods_used("large") == {"pod-1", "pod-2"}
        response, described = await s.operate("POST", "/admin/pods", s.plan.static(1, weight=2)[0])
        assert (response.status, described["pool"], described["weight"]) == (200, "large", 2)
        response, body = await s.operate("POST", "/admin/pods", {**s.plan.static(1)[0], "pool": "huge"})
        assert (response.status, body["error"]["param"]) == (400, "pool")
        _, config = await s.operate("GET", "/admin/config")
        assert config["pools"]["large"]["flowControl"]["maxQueued"] == {"value": 5000, "origin": "default"}
        assert "schedulingProfiles" in config["pools"]["large"]["scheduling"]


async def test_pods_added_to_a_pool_by_an_operator_are_removed_with_it() -> None:
    async with pools(SMALL, LARGE, here=1, large={"pods": {"static": []}}) as s:
        await s.operate("POST", "/admin/pods", {**s.plan.static(1)[0], "pool": "large"})
        await s.reload(large=False)
        await until(lambda: [endpoint.name for endpoint in s.app.fleet.endpoints] == ["pod-0"])


async def test_a_pool_has_its_own_file_of_pods(tmp_path: Path) -> None:
    path = tmp_path / "pods.yaml"
    path.write_text("[]")
    async with pools(SMALL, LARGE, here=1, large={"pods": {"file": str(path)}}) as s:
        path.write_text(yaml.safe_dump(s.plan.static(1)))
        await until(lambda: len(s.app.fleet.ready) == 2)
        endpoint = s.app.fleet.get("pod-1")
        assert endpoint is not None
        assert endpoint.pool == "large"
        assert await s.pods_used("large") == {"pod-1"}
        path.write_text("[]")
        await until(lambda: len(s.app.fleet.endpoints) == 1)


async def test_requests_about_a_stored_response_go_to_its_pool() -> None:
    async with pools(SMALL, LARGE, here=1) as s:
        response, first = await s.post("/v1/responses", {"model": "large", "input": "Hi"})
        assert (response.status, response.headers[NAMED]) == (200, "pod-1")
        later = {"model": "large", "input": "And then?", "previous_response_id": first["id"]}
        assert (await s.post("/v1/responses", later))[0].headers[NAMED] == "pod-1"
        async with s.http.get(f"{s.url}/v1/responses/{first['id']}") as stored:
            assert stored.headers[NAMED] == "pod-1"


async def test_the_record_names_the_pool_except_the_default_one(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    telemetry = {"accessLog": False, "record": {"file": str(path)}}
    async with pools(SMALL, LARGE, here=1, telemetry=telemetry) as s:
        await s.ask("small")
        await s.ask("large")
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line.get("pool") for line in lines if "chain" in line] == [None, "large"]


@pytest.mark.parametrize(
    ("pools", "path"),
    [
        ({"default": {}}, "pools.default"),
        ({"a b": {}}, "pools.a b"),
        ({"large": []}, "pools.large"),
        ([], "pools"),
        ({"large": {"pods": {"warmup": {"prompts": -1}}}}, "pools.large.pods.warmup.prompts"),
        ({"large": {"disaggregation": {"connector": "x"}}}, "pools.large.disaggregation.connector"),
        ({"large": {"pods": {"static": [{"url": "http://x:1"}]}}}, "pools.large.pods.static[0].name"),
        ({"large": {"models": {}}}, "pools.large"),
    ],
)
def test_faults_of_a_pool_are_reported_with_their_path(pools: Any, path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_mapping({"pods": {"static": [{"url": "http://x:1"}]}, "pools": pools})
    assert path in {problem.path for problem in raised.value.problems}


def test_a_rewrite_to_an_unknown_pool_is_a_fault() -> None:
    rewrites = [{"model": "a", "targets": [{"model": "b", "pool": "larg"}]}]
    with pytest.raises(
        ConfigError,
        match=r"models\.rewrites\[0\]\.targets\[0\]\.pool: there is no pool 'larg'; pools are default, large",
    ):
        from_mapping({"pools": {"large": {}}, "models": {"rewrites": rewrites}})
