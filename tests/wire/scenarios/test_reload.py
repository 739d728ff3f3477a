"""A reload while the proxy serves: completely or not at all, without effect on other requests."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.errors import ConfigError
from proxy.lab.sim import SimConfig, SimFleet
from proxy.lab.sim.config import StepTiming
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.settings import Settings, from_mapping
from tests.helpers.http.authority import self_signed
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.02))
"""Fifty tokens a second."""

HELLO = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}

DOCUMENT = "The pod holds a prefix. " * 300


def other(s: Stack, **sections: Mapping[str, Any]) -> Settings:
    """The settings of the stack with these in place of its sections."""
    return from_mapping(body(s, **sections))


def body(s: Stack, **sections: Mapping[str, Any]) -> dict[str, Any]:
    pods = [{"url": url, "name": f"pod-{index}"} for index, url in enumerate(s.sim.urls)]
    given: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "pods": {"static": pods},
        "telemetry": {"accessLog": False},
    }
    return {**given, **sections}


def weighted(queue: float, **producer: Any) -> dict[str, Any]:
    return {
        "plugins": [
            {"type": "approx-prefix-cache-producer", "parameters": producer},
            {"type": "prefix-cache-scorer"},
            {"type": "queue-scorer"},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [
                    {"pluginRef": "prefix-cache-scorer", "weight": 3},
                    {"pluginRef": "queue-scorer", "weight": queue},
                ],
            }
        ],
    }


@asynccontextmanager
async def loaded(s: Stack, clients: int = 6) -> AsyncIterator[list[str]]:
    """Streams and complete responses, as fast as they come, while the body runs; what went wrong with them."""
    failures: list[str] = []
    stop = asyncio.Event()

    async def ask(client: int) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            question = {
                "model": "sim",
                "messages": [{"role": "user", "content": f"{client}: question {number}"}],
                "max_tokens": 6,
                "stream": bool(number % 2),
            }
            async with s.http.post(s.url + CHAT, json=question) as response:
                raw = await response.read()
                if response.status != 200 or (number % 2 and not raw.endswith(b"data: [DONE]\n\n")):
                    failures.append(f"{response.status}: {raw[-200:]!r}")

    tasks = [asyncio.create_task(ask(client)) for client in range(clients)]
    try:
        yield failures
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def test_no_request_or_stream_is_lost_while_everything_changes() -> None:
    async with stack(2) as s, SimFleet(1, SimConfig(time_scale=20)) as extra, loaded(s) as failures:
        more = [*body(s)["pods"]["static"], {"url": extra.urls[0], "name": "extra"}]
        changes: list[dict[str, Any]] = [
            {"scheduling": weighted(1)},
            {"scheduling": weighted(2, maxBytes="1MiB"), "flowControl": {"maxConcurrent": 4}},
            {"pods": {"static": more}, "flowControl": {"maxConcurrentPerPod": 2, "fairness": "strict"}},
            {"models": {"aliases": {"best": "sim"}}, "reliability": {"timeouts": {"firstByte": "60s"}}},
            {"reliability": {"breaker": {"failures": 9, "slowStart": "0s"}, "health": {"interval": "1s"}}},
            {},
        ]
        for change in changes * 3:
            await s.app.reload(other(s, **change))
            await asyncio.sleep(0.03)
        assert failures == []
        assert s.app.ledger.entered > 50, "no client sent anything"


async def test_running_streams_end_unchanged_and_are_counted_once() -> None:
    async with stack(2, SLOW) as s:
        async with s.http.post(
            s.url + CHAT, json={**HELLO, "max_tokens": 40, "stream": True, "ignore_eos": True}
        ) as response:
            assert (await response.content.readline()).startswith(b"data: ")
            await s.app.reload(other(s, scheduling=weighted(1)))
            await s.app.reload(other(s, scheduling=weighted(2)))
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await s.idle()


@pytest.mark.parametrize("parameters", [{}, {"maxBytes": "1MiB"}])
async def test_prefixes_stay_known_with_the_same_or_another_producer(
    parameters: dict[str, Any],
) -> None:
    async with stack(3, settings={"scheduling": weighted(1)}) as s:
        response, _ = await s.chat(DOCUMENT)
        await s.app.reload(other(s, scheduling=weighted(0.5, **parameters)))
        homes = {(await s.chat(DOCUMENT + f"Question {n}?"))[0].headers["x-kvlane-endpoint"] for n in range(6)}
        assert homes == {response.headers["x-kvlane-endpoint"]}


async def test_blocks_of_another_size_start_empty() -> None:
    async with stack(1, settings={"scheduling": weighted(1)}) as s:
        await s.chat(DOCUMENT)
        assert await s.sample("kvlane_prefix_index_blocks")
        await s.app.reload(other(s, scheduling=weighted(1, blockSizeTokens=128)))
        assert await s.sample("kvlane_prefix_index_blocks") == 0
        await s.chat(DOCUMENT)
        assert await s.sample("kvlane_prefix_index_blocks")


async def test_the_predictor_keeps_its_observations_with_other_costs() -> None:
    async with stack(1) as s:
        await s.chat(stream=False)
        (before,) = _predictors(s)
        dear = {"type": "predicted-latency-producer", "parameters": {"workCost": 0.9}}
        await s.app.reload(other(s, scheduling={"plugins": [dear]}))
        (after,) = _predictors(s)
        assert after is not before
        assert after.work_cost == 0.9
        assert after.fleet is before.fleet
        assert after.models(s.app.fleet.endpoints, 0.0) == before.models(s.app.fleet.endpoints, 0.0)


def _predictors(s: Stack) -> list[PredictedLatencyProducer]:
    return [one for one in s.app.schedulings["default"].instances.values() if isinstance(one, PredictedLatencyProducer)]


async def test_a_plugin_with_unchanged_parameters_stays() -> None:
    async with stack(1, settings={"scheduling": weighted(1)}) as s:
        before = dict(s.app.schedulings["default"].instances)
        await s.app.reload(other(s, scheduling=weighted(4)))
        assert (
            s.app.schedulings["default"].instances["approx-prefix-cache-producer"]
            is before["approx-prefix-cache-producer"]
        )
        assert s.app.schedulings["default"].instances["queue-scorer"] is before["queue-scorer"]


async def test_sessions_stay_bound_with_another_time_to_live() -> None:
    def affine(ttl: float) -> dict[str, Any]:
        parameters = {"strategy": "session_id", "sessionIdConfig": {"evictionTtlSeconds": ttl}}
        return {"plugins": [{"type": "session-affinity-scorer", "parameters": parameters}]}

    async with stack(4, settings={"scheduling": affine(300)}) as s:
        sessions = {f"session-{n}": "" for n in range(8)}
        for session in sessions:
            response, _ = await s.post(CHAT, HELLO, {"x-session-id": session})
            sessions[session] = response.headers["x-kvlane-endpoint"]
        await s.app.reload(other(s, scheduling=affine(60)))
        for session, home in sessions.items():
            response, _ = await s.post(CHAT, HELLO, {"x-session-id": session})
            assert response.headers["x-kvlane-endpoint"] == home


async def test_queued_requests_stay_queued_and_proceed_with_a_higher_cap() -> None:
    async with stack(1, SLOW, {"flowControl": {"maxConcurrent": 1}}) as s:
        running = [asyncio.create_task(s.chat(f"Question {n}", max_tokens=20, ignore_eos=True)) for n in range(4)]
        await until(lambda: len(s.pods[0].requests.open) == 1)
        await asyncio.sleep(0.05)
        await s.app.reload(other(s, flowControl={"maxConcurrent": 1, "ordering": "edf"}))
        await asyncio.sleep(0.05)
        assert len(s.pods[0].requests.open) == 1
        await s.app.reload(other(s, flowControl={"maxConcurrent": 3}))
        await until(lambda: len(s.pods[0].requests.open) == 3)
        await s.app.reload(other(s))
        await until(lambda: len(s.pods[0].requests.open) == 4)
        assert [response.status for response, _ in await asyncio.gather(*running)] == [200] * 4
        await s.idle()


async def test_pods_are_added_and_removed_and_the_others_are_not_scraped_again() -> None:
    async with stack(2) as s, SimFleet(1, SimConfig(time_scale=20)) as extra:
        kept = s.app.fleet.get("pod-0")
        s.app.fleet.drain("pod-0")
        pods = [{"url": s.sim.urls[0], "name": "pod-0"}, {"url": extra.urls[0], "name": "extra"}]
        await s.app.reload(other(s, pods={"static": pods}))
        await until(lambda: [pod.name for pod in s.app.fleet.ready] == ["extra"])
        assert s.app.fleet.get("pod-0") is kept
        response, _ = await s.chat()
        assert response.headers["x-kvlane-endpoint"] == "extra"
        await until(lambda: s.app.fleet.get("pod-1") is None)


async def test_pods_of_a_file_are_removed_with_the_file(tmp_path: Path) -> None:
    async with stack(2) as s:
        listed = tmp_path / "pods.yaml"
        listed.write_text(f"- {{url: '{s.sim.urls[1]}', name: listed}}\n")
        first = {"static": [{"url": s.sim.urls[0], "name": "pod-0"}]}
        await s.app.reload(other(s, pods={**first, "file": str(listed)}))
        await until(lambda: {pod.name for pod in s.app.fleet.ready} == {"pod-0", "listed"})
        await s.app.reload(other(s, pods=first))
        await until(lambda: {pod.name for pod in s.app.fleet.endpoints} == {"pod-0"})


async def test_an_open_breaker_stays_open() -> None:
    async with stack(2) as s:
        (pod, _) = s.app.fleet.endpoints
        s.app.breakers.hear(pod, True)
        await s.app.reload(other(s, reliability={"breaker": {"failures": 50}}))
        assert s.app.breakers.state(pod) == "open"
        assert [endpoint.name for endpoint in s.app.fleet.ready] == ["pod-1"]


async def test_keys_limits_and_model_names_of_the_new_configuration_apply() -> None:
    message = {**HELLO, "model": "best"}
    async with stack(1) as s:
        assert (await s.post(CHAT, message))[0].status == 404
        keys = [{"name": "a", "key": "secret-a", "limits": {"requestsPerMinute": 2}}]
        changed = other(s, security={"apiKeys": keys}, models={"aliases": {"best": "sim"}})
        await s.app.reload(changed)
        assert (await s.post(CHAT, message))[0].status == 401
        mine = {"authorization": "Bearer secret-a"}
        assert (await s.post(CHAT, message, mine))[0].status == 200
        await s.app.reload(other(s, security={"apiKeys": keys, "exposeEndpoint": False}))
        assert (await s.post(CHAT, message, mine))[0].status == 404
        await s.app.reload(changed)
        statuses = [(await s.post(CHAT, message, mine))[0].status for _ in range(3)]
        assert 429 in statuses, "what the key has had is forgotten"
        await s.app.reload(other(s))
        assert (await s.post(CHAT, {**message, "model": "sim"}))[0].status == 200


async def test_timeouts_and_retries_of_the_new_configuration_apply() -> None:
    async with stack(1, SLOW) as s:
        await s.app.reload(other(s, reliability={"timeouts": {"request": "200ms"}}))
        response, _ = await s.chat(max_tokens=200, ignore_eos=True)
        assert response.status == 504


async def test_a_faulty_configuration_changes_nothing_and_all_faults_are_reported() -> None:
    async with stack(1) as s:
        faulty = body(s, reliability={"retries": {"attempts": 0}}, listn={}, scheduling={"plugins": [{"type": "nope"}]})
        response, payload = await s.operate("POST", "/admin/config", faulty)
        assert response.status == 400
        assert payload["error"]["code"] == "invalid_configuration"
        paths = {problem["path"] for problem in payload["error"]["problems"]}
        assert {"", "reliability.retries.attempts"} < paths
        assert any(path.startswith("scheduling") for path in paths)
        assert await s.sample("kvlane_config_version") == 1
        assert await s.sample("kvlane_config_last_reload_successful") == 0
        assert await s.sample('kvlane_config_reloads_total{result="refused"}') == 1
        assert (await s.chat())[0].status == 200


async def test_an_unreadable_key_file_changes_nothing(tmp_path: Path) -> None:
    async with stack(1) as s:
        scheduling, settings = (
            s.app.schedulings["default"],
            other(s, security={"apiKeysFile": str(tmp_path / "none.yaml")}, scheduling=weighted(1)),
        )
        with pytest.raises(ConfigError, match="cannot be read"):
            await s.app.reload(settings)
        assert s.app.schedulings["default"] is scheduling
        assert s.app.effective()["security"]["apiKeysFile"]["value"] is None
        assert (await s.chat())[0].status == 200


async def test_a_dry_run_warns_of_likely_mistakes() -> None:
    async with stack(1) as s:
        _, payload = await s.operate("POST", "/admin/config?dry_run=1", {"reliability": {"retries": {"attempts": 7}}})
        assert [warning for warning in payload["warnings"] if warning.startswith("no pods are configured")]


async def test_a_dry_run_lists_changes_and_changes_nothing() -> None:
    async with stack(1) as s:
        wanted = body(s, listen={"host": "127.0.0.1", "port": 1}, reliability={"retries": {"attempts": 7}})
        response, payload = await s.operate("POST", "/admin/config?dry_run=1", wanted)
        assert response.status == 200
        assert payload["dryRun"] is True
        assert payload["changed"] == ["listen.port", "reliability.retries.attempts"]
        assert payload["needsRestart"] == ["listen.port"]
        assert payload["warnings"] == []
        assert payload["number"] == 1
        _, shown = await s.operate("GET", "/admin/config")
        assert shown["reliability"]["retries"]["attempts"]["value"] == 3
        assert await s.sample("kvlane_config_version") == 1


async def test_a_dry_run_leaves_the_plugins_unchanged() -> None:
    async with stack(2, settings={"scheduling": weighted(1)}) as s:
        await s.chat(DOCUMENT)
        serving = s.app.serving
        index = serving.schedulings["default"].instances["approx-prefix-cache-producer"].index  # type: ignore[attr-defined]
        version = index.version
        wanted = body(s, scheduling=weighted(1, maxBytes="1KiB"), flowControl={"maxConcurrent": 1})
        _, payload = await s.operate("POST", "/admin/config?dry_run=1", wanted)
        assert payload["dryRun"] is True
        assert s.app.serving is serving
        assert index.version == version
        assert not serving.flow_controls


async def test_a_change_can_be_rolled_back_and_repeated() -> None:
    async with stack(1) as s:
        response, payload = await s.operate("POST", "/admin/config/rollback")
        assert (response.status, payload["error"]["code"]) == (409, "conflict")

        async def attempts() -> tuple[int, int, str]:
            _, shown = await s.operate("GET", "/admin/config")
            version = shown["version"]
            return shown["reliability"]["retries"]["attempts"]["value"], version["number"], version["origin"]

        response, payload = await s.operate("POST", "/admin/config", body(s, reliability={"retries": {"attempts": 7}}))
        assert (response.status, payload["changed"]) == (200, ["reliability.retries.attempts"])
        assert await attempts() == (7, 2, "admin")
        response, _ = await s.operate("POST", "/admin/config/rollback")
        assert response.status == 200
        assert await attempts() == (3, 3, "rollback")
        await s.operate("POST", "/admin/config/rollback")
        assert await attempts() == (7, 4, "rollback")
        assert await s.sample("kvlane_config_version") == 4
        assert await s.sample("kvlane_config_last_reload_successful") == 1
        assert await s.sample('kvlane_config_reloads_total{result="applied"}') == 3


async def test_an_unchanged_configuration_is_no_new_version() -> None:
    async with stack(1) as s:
        _, first = await s.operate("POST", "/admin/config", body(s))
        assert (first["number"], first["changed"]) == (1, [])
        assert await s.sample('kvlane_config_reloads_total{result="unchanged"}') == 1


async def test_settings_that_need_a_restart_stay_and_the_rest_changes() -> None:
    async with stack(1) as s:
        wanted = body(s, telemetry={"accessLog": True, "askForUsage": True}, admin={"port": 1, "apiKey": "new"})
        _, payload = await s.operate("POST", "/admin/config", wanted)
        assert sorted(payload["needsRestart"]) == ["admin.port", "telemetry.accessLog"]
        assert (await s.operate("GET", "/admin/config"))[0].status == 401, "the new key is asked for"
        async with s.http.get(s.admin + "/admin/config", headers={"authorization": "Bearer new"}) as response:
            shown = await response.json()
        assert shown["telemetry"]["accessLog"]["value"] is False
        assert shown["telemetry"]["askForUsage"]["value"] is True
        assert sorted(shown["version"]["needsRestart"]) == ["admin.port", "telemetry.accessLog"]


async def test_variables_are_resolved_only_with_a_key() -> None:
    async with stack(1) as s:
        wanted = body(s, reliability={"retries": {"attempts": "${KVLANE_TEST_ATTEMPTS:-5}"}})
        response, payload = await s.operate("POST", "/admin/config", wanted)
        assert response.status == 400
        assert "admin.apiKey" in payload["error"]["message"]
        await s.operate("POST", "/admin/config", body(s, admin={"port": 0, "apiKey": "new"}))
        headers = {"authorization": "Bearer new"}
        async with s.http.post(s.admin + "/admin/config", json=wanted, headers=headers) as result:
            assert result.status == 200


@pytest.mark.parametrize(
    "sections",
    [
        {"scheduling": {"file": "FILE"}},
        {"pools": {"small": {"scheduling": {"file": "FILE"}, "pods": {"static": []}}}},
        {"security": {"apiKeysFile": "FILE"}},
        {"security": {"jwt": {"jwks": "FILE", "issuer": "i", "audience": ["a"]}}},
        {"pods": {"file": "FILE"}},
        {"pods": {"static": [{"url": "https://127.0.0.1:9", "tls": {"ca": "FILE"}}]}},
        {"admin": {"port": 0, "tls": {"cert": "FILE"}}},
    ],
    ids=lambda sections: next(iter(sections)),
)
async def test_an_admin_port_without_a_key_reads_only_files_in_effect(sections: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:hash: of a password\n")
    named = json.loads(json.dumps(sections).replace("FILE", str(tmp_path / "secret")))
    async with stack(1) as s:
        for query in ("", "?dry_run=1"):
            response, payload = await s.operate("POST", f"/admin/config{query}", body(s, **named))
            assert response.status == 400
            assert "admin.apiKey" in payload["error"]["message"]
            assert "password" not in str(payload)
        assert (await s.operate("GET", "/admin/config"))[1]["version"]["number"] == 1


async def test_a_pod_may_leave_while_files_of_the_pods_behind_it_are_in_effect(tmp_path: Path) -> None:
    tls = {"ca": str(self_signed(tmp_path / "ca.pem"))}
    pods = [{"url": f"https://127.0.0.1:{port}", "tls": tls} for port in (7, 9)]
    async with stack(1, settings={"pods": {"static": [{"url": "http://127.0.0.1:5"}, *pods]}}) as s:
        response, payload = await s.operate("POST", "/admin/config", body(s, pods={"static": pods}))
        assert response.status == 200, payload


async def test_the_admin_key_may_name_a_file(tmp_path: Path) -> None:
    (tmp_path / "scheduling.json").write_text(json.dumps(weighted(1)))
    async with stack(1) as s:
        await s.operate("POST", "/admin/config", body(s, admin={"port": 0, "apiKey": "new"}))
        wanted = body(s, scheduling={"file": str(tmp_path / "scheduling.json")})
        headers = {"authorization": "Bearer new"}
        async with s.http.post(s.admin + "/admin/config", json=wanted, headers=headers) as response:
            assert response.status == 200


async def test_concurrent_changes_apply_one_after_the_other() -> None:
    async with stack(1) as s:
        wanted = [body(s, reliability={"retries": {"attempts": 4 + n}}) for n in range(6)]
        responses = await asyncio.gather(*(s.operate("POST", "/admin/config", one) for one in wanted))
        assert sorted(response["number"] for _, response in responses) == [2, 3, 4, 5, 6, 7]
        _, shown = await s.operate("GET", "/admin/config")
        (last,) = [response for _, response in responses if response["number"] == 7]
        assert shown["version"]["sha256"] == last["sha256"]


async def test_many_reloads_leak_nothing() -> None:
    async with stack(2) as s:
        before = len(asyncio.all_tasks())
        for number in range(20):
            settings = {"interval": f"{3 + number}s"}
            keys = [{"name": "a", "key": f"key-{number}"}]
            await s.app.reload(
                other(s, reliability={"health": settings}, security={"apiKeys": keys} if number % 2 else {})
            )
        await s.app.reload(other(s))
        await asyncio.sleep(0.05)
        assert len(asyncio.all_tasks()) <= before + 2
        indexes = [
            p for p in s.app.schedulings["default"].instances.values() if isinstance(p, ApproxPrefixCacheProducer)
        ]
        assert len(indexes) == 1
