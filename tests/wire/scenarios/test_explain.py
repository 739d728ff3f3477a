"""Explanations of decisions by a whole proxy before simulated pods."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from proxy.lab.sim import SimConfig
from proxy.lab.sim.faults import Fault, FaultKind
from proxy.scheduling.explained_log import Explained
from tests.helpers.scenarios.disagg import PROMPT, disaggregated
from tests.helpers.scenarios.disagg import SCHEDULING as SPLIT
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

ON: Mapping[str, Any] = {"telemetry": {"accessLog": False, "decisions": {}}}
ONLY_ON_REQUEST: Mapping[str, Any] = {"telemetry": {"accessLog": False, "decisions": {"sample": 0}}}

SCHEDULING: Mapping[str, Any] = {
    "plugins": [
        {"type": "prefix-cache-scorer"},
        {"type": "queue-scorer"},
        {"type": "session-affinity-scorer"},
        {"type": "round-robin-picker"},
        {"type": "random-picker"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "prefix-cache-scorer"},
                {"pluginRef": "queue-scorer"},
                {"pluginRef": "session-affinity-scorer"},
                {"pluginRef": "round-robin-picker"},
            ],
        },
        {"name": "dice", "shadow": True, "plugins": [{"pluginRef": "random-picker"}]},
    ],
}

BODY = {"model": "sim", "messages": [{"role": "user", "content": "The sea, the sea. " * 100}], "max_tokens": 2}


async def ask(s: Stack, name: str, body: Any = BODY, **headers: str) -> Mapping[str, str]:
    """The headers of the response."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    response, _ = await s.post(CHAT, body, {"x-request-id": name, **named})
    return response.headers


async def decided(s: Stack, name: str) -> Any:
    response, table = await s.operate("GET", f"/debug/decisions/{name}")
    assert response.status == 200, table
    return table


async def listed(s: Stack, query: str = "") -> list[Any]:
    response, body = await s.operate("GET", f"/debug/decisions{query}")
    assert response.status == 200, body
    return list(body["decisions"])


async def reload(s: Stack, wanted: Any) -> None:
    async with s.http.post(s.admin + "/admin/config", data=yaml.safe_dump(wanted)) as response:
        assert response.status == 200, await response.text()


async def imagined(s: Stack, dry_run: Any, query: str = "", status: int = 200) -> Any:
    response, body = await s.operate("POST", f"/debug/explain{query}", dry_run)
    assert response.status == status, body
    return body


async def test_a_client_that_requests_it_gets_a_header_and_the_decision_is_kept() -> None:
    async with stack(3, settings=ONLY_ON_REQUEST) as s:
        assert "x-kvlane-decision" not in await ask(s, "quiet")
        await ask(s, "first", x_kvlane_explain="1")
        headers = await ask(s, "second", x_kvlane_explain="1")
        assert f'pod="{headers["x-kvlane-endpoint"]}"' in headers["x-kvlane-decision"]
        assert re.search(r"hit=\d{2,}", headers["x-kvlane-decision"])
        assert "sea" not in headers["x-kvlane-decision"]
        assert [one["request"] for one in await listed(s)] == ["second", "first"]
        table = await decided(s, "second")
        assert table["answeredBy"] == table["pod"] == headers["x-kvlane-endpoint"]
        assert table["cachedTokens"] > 0
        assert table["predicted"]["cachedTokens"] > 0
        assert (table["outcome"], table["status"], table["tries"]) == ("complete", 200, 1)
        assert table["legs"][0]["completionTokens"] == 2
        assert "sea" not in str(table)
        response, _ = await s.operate("GET", "/debug/decisions/quiet")
        assert response.status == 404


async def test_a_prompt_shorter_than_a_block_has_no_predicted_hits() -> None:
    short = {"model": "sim", "messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 2}
    async with stack(1, settings=ONLY_ON_REQUEST) as s:
        await ask(s, "first", short, x_kvlane_explain="1")
        headers = await ask(s, "second", short, x_kvlane_explain="1")
        assert "hit=0," in headers["x-kvlane-decision"]
        table = await decided(s, "second")
        assert (table["predicted"]["cachedTokens"], table["pods"][0]["hitTokens"]) == (0, 0)
        assert (table["legs"][0]["predictedCachedTokens"], table["cachedTokens"]) == (0, 0)


async def test_disabled_recording_has_no_effect() -> None:
    async with stack(1) as s:
        assert "x-kvlane-decision" not in await ask(s, "a", x_kvlane_explain="1")
        response, body = await s.operate("GET", "/debug/decisions")
        assert (response.status, body["on"], body["decisions"]) == (200, False, [])
        assert "telemetry" in body["hint"]
        assert s.app._process.serving.gateway.sampler.wants is None
        listeners = s.app._server.service.listeners
        assert not any(isinstance(listener, Explained) for listener in listeners.all)


async def test_recording_is_switched_while_requests_run() -> None:
    async with stack(2, settings={"telemetry": {"accessLog": False}}) as s:
        given = dict(s.app._settings.source)
        long = asyncio.ensure_future(ask(s, "long", {**BODY, "max_tokens": 400, "ignore_eos": True}))
        await until(lambda: s.app.ledger.in_flight == 1)
        for telemetry in (ON["telemetry"], {"accessLog": False}):
            await reload(s, {**given, "telemetry": telemetry})
            await ask(s, "short")
            _, body = await s.operate("GET", "/debug/decisions")
            assert [one["request"] for one in body["decisions"]] == ["short"] * body["on"]
        assert s.app._process.serving.gateway.sampler.wants is None
        await long
        await s.idle()


async def test_with_keys_only_admin_keys_get_the_header() -> None:
    keys = [{"name": "user", "key": "user"}, {"name": "ops", "key": "ops", "scopes": ["inference", "admin"]}]
    async with stack(1, settings={**ONLY_ON_REQUEST, "security": {"apiKeys": keys}}) as s:
        user = await ask(s, "a", authorization="Bearer user", x_kvlane_explain="1")
        ops = await ask(s, "b", authorization="Bearer ops", x_kvlane_explain="1")
        assert "x-kvlane-endpoint" in user
        assert "x-kvlane-decision" not in user
        assert "x-kvlane-decision" in ops
        for method, path in (("GET", "/debug/decisions"), ("GET", "/debug/decisions/b"), ("POST", "/debug/explain")):
            assert (await s.operate(method, path))[0].status == 401
        async with s.http.get(s.admin + "/debug/decisions", headers={"authorization": "Bearer ops"}) as response:
            assert [one["request"] for one in (await response.json())["decisions"]] == ["b"]


async def test_without_exposed_pods_no_client_gets_the_header() -> None:
    async with stack(1, settings={**ON, "security": {"exposeEndpoint": False}}) as s:
        assert "x-kvlane-decision" not in await ask(s, "a", x_kvlane_explain="1")


async def test_a_request_without_a_pod_is_recorded() -> None:
    only_decode = {"plugins": [{"type": "decode-filter"}, {"type": "queue-scorer"}]}
    async with stack(1, settings={**ON, "scheduling": only_decode}, each=[{"role": "prefill"}]) as s:
        await ask(s, "refused")
        (one,) = await listed(s, "?outcome=rejected-no-endpoints")
        assert (one["request"], one["pod"], one["status"]) == ("refused", None, 503)


async def test_a_retry_shows_both_pods() -> None:
    async with stack(2, settings=ON) as s:
        await ask(s, "before")
        for pod in s.pods:
            pod.faults.set([Fault(FaultKind.REJECT, count=1)])
        await ask(s, "retried")
        table = await decided(s, "retried")
        assert table["tries"] >= 2
        assert table["legs"][0]["pod"] == table["pod"]
        assert {attempt["pod"] for attempt in table["legs"]} == {"pod-0", "pod-1"}


async def test_a_split_request_has_both_profiles_and_attempts() -> None:
    async with disaggregated(scheduling={**SPLIT}) as s:
        await reload(s, {**s.app._settings.source, **ON})
        await ask(s, "split", {**BODY, "messages": [{"role": "user", "content": PROMPT}]})
        await until(lambda: not s.app.ledger.in_flight)
        table = await decided(s, "split")
        assert table["why"] == "split"
        assert table["prefill"] in ("pod-0", "pod-1")
        assert table["pod"] in ("pod-2", "pod-3")
        assert {one["profile"] for one in table["profiles"]} == {"prefill", "decode"}
        stages = {attempt["stage"]: attempt for attempt in table["legs"]}
        assert stages["prefill"]["pod"] == table["prefill"]
        assert stages["decode"]["pod"] == table["pod"]
        assert (stages["prefill"]["forClient"], stages["decode"]["forClient"]) == (False, True)
        assert table["tries"] == 1


async def test_a_request_that_cannot_be_split_has_a_reason() -> None:
    async with disaggregated(scheduling={**SPLIT}) as s:
        await reload(s, {**s.app._settings.source, **ON})
        await ask(s, "two", {**BODY, "messages": [{"role": "user", "content": PROMPT}], "n": 2})
        await until(lambda: not s.app.ledger.in_flight)
        table = await decided(s, "two")
        assert (table["why"], table["prefill"]) == ("several-choices", None)
        assert [(attempt["pod"], attempt["stage"]) for attempt in table["legs"]] == [(table["pod"], "whole")]


async def test_each_pool_has_its_own_decisions() -> None:
    async with stack(2, [SimConfig(time_scale=20), SimConfig(model="large", time_scale=20)]) as s:
        given = dict(s.app._settings.source)
        first, second = given["pods"]["static"]
        pools = {"large": {"pods": {"static": [second]}}}
        wanted = {**given, **ON, "pods": {"static": [first]}, "pools": pools}
        await reload(s, wanted)
        await until(lambda: len(s.app.fleet.ready) == 2 and s.app.fleet.knows("large"))
        await ask(s, "a")
        await ask(s, "b", {**BODY, "model": "large"})
        tables = [await decided(s, name) for name in "ab"]
        assert [(one["pool"], one["absent"]) for one in tables] == [("default", []), ("large", [])]
        (one,) = await listed(s, "?pool=large")
        assert one["request"] == "b"
        assert (await imagined(s, BODY, "?pool=large"))["pod"] is None
        assert (await imagined(s, {**BODY, "model": "large"}))["pool"] == "large"


async def test_a_dry_run_shows_the_decision_and_changes_nothing() -> None:
    async with stack(3, settings={**ON, "scheduling": SCHEDULING}) as s:
        for number in range(4):
            await ask(s, f"r{number}", x_session_id="s")
        await s.idle()
        before = await everything(s)
        for _ in range(7):
            table = await imagined(s, {"request": BODY, "headers": {"X-Session-Id": "s"}})
            assert [one["profile"] for one in table["profiles"]] == ["default", "dice"]
            assert await everything(s) == before
        assert await imagined(s, {"request": BODY, "weights": {"queue-scorer": 5}})
        assert await imagined(s, {"request": BODY, "scheduling": {"plugins": [{"type": "queue-scorer"}]}})
        assert await imagined(s, BODY, "?profile=dice")
        assert await everything(s) == before
        await ask(s, "next", x_session_id="s")
        real = await decided(s, "next")
        assert real["pod"] == table["pod"]
        assert [one["totals"] for one in real["profiles"][:1]] == [one["totals"] for one in table["profiles"][:1]]


async def everything(s: Stack) -> Any:
    """What a request would change: what is known of prompts, sessions and turns, loads, and all that is counted."""
    scheduling = s.app.schedulings["default"]
    indexes = [(index.version, index.blocks(pod)) for index in s.app._indexes() for pod in s.app.fleet.endpoints]
    turns = dict(scheduling.instances["round-robin-picker"]._credit)  # type: ignore[attr-defined]
    sessions = list(scheduling.instances["session-affinity-scorer"].table.recent(100))  # type: ignore[attr-defined]
    loads = [(pod.load.requests, pod.load.tokens, pod.load.recent) for pod in s.app.fleet.endpoints]
    async with s.http.get(s.admin + "/metrics") as response:
        series = (await response.text()).splitlines()
    moving = re.compile(r"process_|python_|kvlane_(loop|scrape|pod_scrape|endpoint_scrape|plugin)|.*(age|_seconds)")
    counted = [line for line in series if line.startswith("kvlane_") and not moving.match(line)]
    kept = s.app._process.explaining.log
    assert kept is not None
    return indexes, turns, sessions, loads, counted, kept.seen


async def test_a_dry_run_with_other_weights_shows_the_difference() -> None:
    both = {"plugins": [{"type": "prefix-cache-scorer"}, {"type": "active-request-scorer"}]}
    async with stack(2, settings={**ON, "scheduling": both}) as s:
        headers = await ask(s, "warm")
        warm = headers["x-kvlane-endpoint"]
        endpoint = next(pod for pod in s.app.fleet.endpoints if pod.name == warm)
        endpoint.charge(50, 0)
        try:
            kept = await imagined(s, {"request": BODY, "weights": {"active-request-scorer": 0}})
            moved = await imagined(s, {"request": BODY, "weights": {"active-request-scorer": 9}})
        finally:
            endpoint.charge(-50, 0)
        assert kept["pod"] == warm
        assert moved["pod"] != warm
        assert moved["live"]["pod"]
        assert moved["fresh"] == []
        assert {one["name"]: one["weight"] for one in moved["profiles"][0]["scorers"]}["active-request-scorer"] == 9


async def test_a_dry_run_for_an_unknown_model_lists_the_pods_with_others() -> None:
    async with stack(2) as s:
        table = await imagined(s, {**BODY, "model": "nobody-has-it"})
        assert table["pod"] is None
        assert table["error"]["message"]
        assert table["absent"] == [{"pod": f"pod-{at}", "why": "model"} for at in range(2)]


@pytest.mark.parametrize(
    "query",
    [
        {"request": {"messages": "no list"}},
        {"request": BODY, "scheduling": {"plugins": [{"type": "queue-scorr"}]}},
        {"request": BODY, "weights": {"queue-scorr": 1}},
        {"request": BODY, "pool": "nowhere"},
        {"request": BODY, "profile": "nothing"},
        {"request": {**BODY, "input": "x", "previous_response_id": "resp_1"}, "path": "/v1/responses"},
        [],
    ],
)
async def test_an_invalid_dry_run_has_a_reason(query: Any) -> None:
    async with stack(1) as s:
        response = await imagined(s, query, status=400)
        assert response["error"]["message"]


async def test_a_slow_pod_is_found() -> None:
    """As an operator would: which requests were slow, what have they in common, what was expected of them."""
    slow, fast = SimConfig(time_scale=0.02), SimConfig(time_scale=40)
    blind = {"plugins": [{"type": "round-robin-picker"}]}
    decisions = {"accessLog": False, "decisions": {"keep": 6, "slow": "500ms"}}
    async with stack(3, [fast, fast, slow], settings={"telemetry": decisions, "scheduling": blind}) as s:
        await asyncio.gather(*(ask(s, f"r{number}", {**BODY, "max_tokens": 6}) for number in range(6)))
        worst = max(await listed(s, "?slow=500ms"), key=lambda one: float(one["ttft"]))
        assert worst["answeredBy"] == "pod-2"
        table = await decided(s, worst["id"])
        (attempt,) = table["legs"]
        assert attempt["pod"] == "pod-2"
        assert attempt["firstByte"] - attempt["sent"] > 0.5 * table["ttft"]
        assert {one["answeredBy"] for one in await listed(s, "?pod=pod-2")} == {"pod-2"}
        state = next(pod for pod in table["pods"] if pod["pod"] == "pod-2")
        assert state["fresh"]
