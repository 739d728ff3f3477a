"""Requests through a real Envoy that uses kvlane as its endpoint picker."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from proxy.lab.sim import SimConfig
from tests.helpers.extproc.gateway import FOLDER, Edit, ext_proc, through_envoy, with_fallbacks, with_subset
from tests.helpers.ports import free_port
from tests.helpers.scenarios.disagg import PROMPT, ROLES, SCHEDULING, SIM
from tests.helpers.scenarios.stack import BLIND, CHAT, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(time_scale=1)
"""About seven milliseconds per token."""

LONG = {"max_tokens": 5000, "ignore_eos": True, "stream": True}


STICKY = {
    "plugins": [
        {"type": "approx-prefix-cache-producer"},
        {"type": "prefix-cache-scorer"},
        {"type": "active-request-scorer"},
        {"type": "max-score-picker"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "prefix-cache-scorer", "weight": 3},
                {"pluginRef": "active-request-scorer", "weight": 2},
                {"pluginRef": "max-score-picker"},
            ],
        }
    ],
}
"""Of what is known here alone, so that the same requests are decided in the same way."""


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], **fields}


def buffered(config: dict[str, Any]) -> None:
    """As gateways of before FULL_DUPLEX_STREAMED."""
    ext_proc(config)["processing_mode"] = {"request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"}


def blind(config: dict[str, Any]) -> None:
    """Shows no bodies of responses."""
    ext_proc(config)["processing_mode"] |= {"response_body_mode": "NONE", "response_trailer_mode": "SKIP"}


def edited(edit: Edit) -> Callable[[Stack], Edit]:
    return lambda s: edit


def address(s: Stack, pod: int) -> str:
    return s.pods[pod].url.removeprefix("http://")


async def events(s: Stack, body: dict[str, Any]) -> tuple[aiohttp.ClientResponse, list[Any]]:
    async with s.http.post(s.url + CHAT, json={**body, "stream": True}) as response:
        text = await response.text()
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return response, [json.loads(each) for each in data]


async def over(s: Stack) -> None:
    """Until all requests have been counted: the client may have its response before the gateway has reported it."""
    await s.idle()
    await until(lambda: not s.app._picker.busy)  # type: ignore[union-attr]
    s.app.observer.flush()


# placement


async def placements(s: Stack) -> list[str]:
    """Of conversations that take turns, while some streams stay open."""
    seen, talks = [], ["the sea " * 40 * (talk + 3) + f"of {talk}" for talk in range(5)]
    async with AsyncExitStack() as held:
        for turn in range(3):
            for talk, text in enumerate(talks):
                response, _ = await events(s, chat_body(text, max_tokens=4))
                seen.append(response.headers["x-kvlane-endpoint"])
                talks[talk] = text + " and then " * 30 * (turn + 1)
            stream = await held.enter_async_context(s.http.post(s.url + CHAT, json=chat_body(f"{turn} " * 99, **LONG)))
            await stream.content.readline()
            seen.append(stream.headers["x-kvlane-endpoint"])
    return seen


def by_first_use(names: Sequence[str]) -> list[int]:
    """Which of several pods without a past gets a request is chance: which pods are the same is not."""
    order = list(dict.fromkeys(names))
    return [order.index(name) for name in names]


@pytest.mark.smoke
async def test_requests_go_to_the_same_pods_as_through_the_data_port(tmp_path: Path) -> None:
    settings = {**BLIND, "scheduling": STICKY}
    async with stack(4, settings=settings) as direct:
        wanted = await placements(direct)
    async with through_envoy(tmp_path, 4, settings=settings) as s:
        found = await placements(s)
        assert by_first_use(found) == by_first_use(wanted)
        assert len(set(found)) == 4
        assert [len(list(pod.requests)) for pod in s.pods] == [found.count(f"pod-{at}") for at in range(4)]
        await s.idle()


# what passes


@pytest.mark.parametrize("edit", [lambda config: None, buffered], ids=["full-duplex", "buffered"])
async def test_responses_pass_and_are_learnt_from(tmp_path: Path, edit: Edit) -> None:
    text = "a long prompt " * 8000
    async with through_envoy(tmp_path, edit=edited(edit)) as s:
        response, body = await s.chat(text)
        assert response.status == 200
        pod = s.pod(response.headers["x-kvlane-endpoint"])
        (record,) = pod.requests
        assert record.id == response.headers["x-request-id"]
        assert body["usage"]["prompt_tokens"] == record.prompt_tokens
        again, _ = await events(s, chat_body(text, max_tokens=3))
        assert s.pod(again.headers["x-kvlane-endpoint"]) is pod
        await over(s)
        assert await s.sample('kvlane_prompt_tokens_total{model="sim"}') == record.prompt_tokens
        assert await s.sample('kvlane_requests_total{model="sim",outcome="complete",path="chat",status="2xx"}') == 2.0


@pytest.mark.parametrize("edit", [lambda config: None, buffered], ids=["full-duplex", "buffered"])
async def test_an_alias_is_rewritten_in_request_and_response(tmp_path: Path, edit: Edit) -> None:
    async with through_envoy(tmp_path, settings={"models": {"aliases": {"nice": "sim"}}}, edit=edited(edit)) as s:
        response, body = await s.chat(model="nice")
        assert (response.status, body["model"]) == (200, "nice")
        _, deliver = await events(s, chat_body("Hi", model="nice"))
        assert {event["model"] for event in deliver} == {"nice"}
        assert {record.model for pod in s.pods for record in pod.requests} == {"sim"}


async def test_usage_that_only_kvlane_requested_is_removed(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, settings={"telemetry": {"accessLog": False, "askForUsage": True}}) as s:
        _, deliver = await events(s, chat_body("Hi", max_tokens=5))
        assert all(not event.get("usage") and event["choices"] for event in deliver)
        await over(s)
        assert await s.sample('kvlane_completion_tokens_total{model="sim"}') == 5.0


async def test_a_gateway_without_response_messages_is_served(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, edit=edited(blind)) as s:
        response, _ = await s.chat()
        assert response.status == 200
        await over(s)
        assert await s.sample('kvlane_requests_total{model="sim",outcome="complete",path="chat",status="2xx"}') == 1.0


async def test_keys_are_required_and_not_passed_on(tmp_path: Path) -> None:
    security = {"apiKeys": [{"key": "sk-0123456789abcdef", "name": "app"}]}
    async with through_envoy(tmp_path, settings={"security": security}) as s:
        response, refused = await s.chat()
        assert (response.status, refused["error"]["code"]) == (401, "invalid_api_key")
        response, _ = await s.post(CHAT, chat_body("Hi"), {"authorization": "Bearer sk-0123456789abcdef"})
        assert response.status == 200
        (record,) = [record for pod in s.pods for record in pod.requests]
        assert "authorization" not in record.headers


async def test_a_prompt_is_computed_by_one_pod_and_decoded_by_another(tmp_path: Path) -> None:
    sims = [SimConfig(time_scale=SIM.time_scale, transfer=SIM.transfer, role=role, connector="nixl") for role in ROLES]
    roles = [{"role": role} for role in ROLES]
    settings = {"scheduling": SCHEDULING, "disaggregation": {"connector": "nixl"}}
    async with through_envoy(tmp_path, 4, sims, settings, roles) as s:
        response, body = await s.chat(PROMPT, max_tokens=6)
        assert (response.status, body["usage"]["completion_tokens"]) == (200, 6)
        assert [len(list(pod.requests)) for pod in s.pods[:2]].count(1) == 1
        assert [len(list(pod.requests)) for pod in s.pods[2:]].count(1) == 1
        await s.idle()


# what is refused


async def test_local_responses_equal_those_of_the_data_port(tmp_path: Path) -> None:
    async with through_envoy(tmp_path) as s:
        for path, status, reason in (
            ("/health", 200, None),
            ("/v1/models", 200, None),
            ("/v1/models/none", 404, "unknown-model"),
            ("/metrics", 404, "unknown-path"),
        ):
            async with s.http.get(s.url + path) as response:
                assert (response.status, response.headers.get("x-kvlane-reason")) == (status, reason), path
        response, refused = await s.chat(model="none")
        assert (response.status, refused["error"]["code"]) == (404, "model_not_found")


async def test_a_response_of_the_gateway_itself_passes(tmp_path: Path) -> None:
    """Envoy refuses an upgrade that it is not configured for before any filter sees the request."""
    async with through_envoy(tmp_path) as s:
        upgrade = {"connection": "Upgrade", "upgrade": "websocket"}
        async with s.http.get(s.url + "/v1/realtime", headers=upgrade) as response:
            assert response.status == 403


async def test_overload_is_refused_with_a_reason_and_retry_after(tmp_path: Path) -> None:
    flow = {"maxConcurrentPerPod": 1, "maxQueued": 0}
    async with through_envoy(tmp_path, 1, SLOW, {"flowControl": flow}) as s:
        async with s.http.post(s.url + CHAT, json=chat_body("Hi", **LONG)) as running:
            await running.content.readline()
            response, refused = await s.chat()
            assert (response.status, refused["error"]["type"]) == (429, "rate_limit_error")
            assert response.headers["x-llm-d-request-dropped-reason"] == response.headers["x-kvlane-reason"]
            assert int(response.headers["retry-after"]) >= 1
        await s.idle()


async def test_a_client_that_leaves_frees_its_pod_or_its_place_in_the_queue(tmp_path: Path) -> None:
    flow = {"maxConcurrentPerPod": 1}
    async with through_envoy(tmp_path, 1, SLOW, {"flowControl": flow}) as s:
        queue = s.app.serving.flow_controls["default"].queue
        async with s.http.post(s.url + CHAT, json=chat_body("Hi", **LONG)) as running:
            await running.content.readline()
            waits = asyncio.ensure_future(s.chat())
            await until(lambda: queue.length == 1)
            waits.cancel()
            await until(lambda: queue.length == 0)
            assert s.app.ledger.in_flight == 1
        await s.idle()
        assert [record.aborted for record in s.pods[0].requests] == [True]
        assert (await s.chat(max_tokens=1))[0].status == 200


async def test_requests_go_only_to_pods_that_the_gateway_allows(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, 3, edit=lambda s: with_subset([address(s, 1), "10.0.0.1:8000"])) as s:
        responses = [await s.chat(f"question {number}") for number in range(6)]
        assert {response.headers["x-kvlane-endpoint"] for response, _ in responses} == {"pod-1"}


@pytest.mark.parametrize("allowed", [[], ["10.0.0.1:8000"]], ids=["none", "unknown"])
async def test_without_an_allowed_pod_the_request_is_refused(tmp_path: Path, allowed: list[str]) -> None:
    async with through_envoy(tmp_path, edit=lambda s: with_subset(allowed)) as s:
        response, _ = await s.chat()
        assert (response.status, response.headers["x-kvlane-reason"]) == (503, "rejected-no-endpoints")


# what fails


@asynccontextmanager
async def with_a_pod_gone(folder: Path, fallbacks: int) -> Any:
    """The first of two, which no scrape has noticed: it is the one with the cache of `PROMPT`."""
    edit = (lambda s: with_fallbacks([address(s, 0), address(s, 1)])) if fallbacks else edited(lambda config: None)
    settings = {
        **BLIND,
        "scheduling": STICKY,
        "extproc": {"fallbacks": fallbacks},
        "reliability": {"health": {"interval": "60s"}},
    }
    async with through_envoy(folder, settings=settings, edit=edit) as s:
        response, _ = await s.chat(PROMPT)
        gone = response.headers["x-kvlane-endpoint"]
        await s.pod(gone).kill()
        yield s, gone


async def test_an_unreachable_pod_is_avoided_after_one_request(tmp_path: Path) -> None:
    async with with_a_pod_gone(tmp_path, 0) as (s, gone):
        response, refused = await s.chat(PROMPT)
        assert (response.status, refused["error"]["code"]) == (502, "upstream_failed")
        response, _ = await s.chat(PROMPT)
        assert (response.status, response.headers["x-kvlane-endpoint"] != gone) == (200, True)
        await until(lambda: s.app.ledger.in_flight == 0)


def permitting_one_request(config: dict[str, Any]) -> None:
    config["static_resources"]["clusters"][0]["circuit_breakers"] = {"thresholds": [{"max_requests": 1}]}


async def test_a_limit_of_the_gateway_is_no_failure_of_a_pod(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, 2, SLOW, edit=edited(permitting_one_request)) as s:
        async with s.http.post(s.url + CHAT, json=chat_body("Hi", **LONG)) as running:
            await running.content.readline()
            for _ in range(3):
                response, refused = await s.chat()
                assert (response.status, refused["error"]["code"]) == (429, "saturated")
            assert response.headers["retry-after"] == "1"
            assert not s.app.fleet.own_ejections()
        await s.idle()
        assert (await s.chat())[0].status == 200


def with_a_refusing_filter(config: dict[str, Any]) -> None:
    """The filter is behind kvlane's, and refuses all requests but one."""
    kind = "type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit"
    always = {"default_value": {"numerator": 100}}
    bucket = {"max_tokens": 1, "fill_interval": "3600s"}
    limits = {"@type": kind, "stat_prefix": "limit", "status": {"code": "ServiceUnavailable"}, "token_bucket": bucket}
    limits |= {"filter_enabled": always, "filter_enforced": always}
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"].insert(-1, {"name": "limit", "typed_config": limits})


async def test_a_response_of_a_filter_behind_kvlane_is_no_failure_of_a_pod(tmp_path: Path) -> None:
    settings = {"reliability": {"breaker": {"failures": 1}}}
    async with through_envoy(tmp_path, settings=settings, edit=edited(with_a_refusing_filter)) as s:
        assert (await s.chat())[0].status == 200
        for _ in range(4):
            async with s.http.post(s.url + CHAT, json=chat_body("Hi")) as response:
                assert (response.status, await response.text()) == (503, "local_rate_limited")
        await s.idle()
        assert not s.app.fleet.own_ejections()


async def test_the_served_pod_is_read_from_a_gateway_with_fallbacks(tmp_path: Path) -> None:
    async with with_a_pod_gone(tmp_path, 1) as (s, gone):
        response, _ = await s.chat(PROMPT)
        assert (response.status, response.headers["x-kvlane-endpoint"] != gone) == (200, True)
        await until(lambda: s.app.ledger.in_flight == 0)
        assert gone in s.app.fleet.own_ejections()


async def test_requests_that_a_pod_drops_go_to_the_next_pod(tmp_path: Path) -> None:
    async with with_a_pod_gone(tmp_path, 1) as (s, _):
        posts = [s.http.post(s.url + CHAT, json=chat_body(f"{number} " * 99)) for number in range(40)]
        assert {response.status for response in await asyncio.gather(*posts)} == {200}


async def test_a_stream_broken_by_its_pod_never_looks_complete(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, 1, SLOW) as s:
        async with s.http.post(s.url + CHAT, json=chat_body("Hi", **LONG)) as response:
            await response.content.readline()
            await s.pods[0].kill()
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        await until(lambda: s.app.ledger.in_flight == 0)


def with_another_kvlane_that_is_gone(config: dict[str, Any]) -> None:
    """Envoy does not know of it yet."""
    kvlane = config["static_resources"]["clusters"][1]
    del kvlane["health_checks"]
    gone = copy.deepcopy(kvlane["load_assignment"]["endpoints"][0]["lb_endpoints"][0])
    gone["endpoint"]["address"]["socket_address"]["port_value"] = free_port()
    kvlane["load_assignment"]["endpoints"][0]["lb_endpoints"].append(gone)


async def test_with_several_kvlanes_a_crashed_one_loses_no_request(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, 1, edit=edited(with_another_kvlane_that_is_gone)) as s:
        prompts = ["x" * size for size in (10, 50_000) * 10]
        responses = await asyncio.gather(*(s.http.post(s.url + CHAT, json=chat_body(prompt)) for prompt in prompts))
        assert [response.status for response in responses] == [200] * len(prompts)


def test_a_stopping_kvlane_is_noticed_in_envoys_first_minute() -> None:
    """Before that it checks once a minute, unless deliver otherwise."""
    config = yaml.safe_load((FOLDER / "envoy.yaml").read_text())
    (check,) = config["static_resources"]["clusters"][1]["health_checks"]
    assert check["no_traffic_interval"] == check["interval"]


async def test_running_streams_are_ended_or_refused_when_kvlane_stops(tmp_path: Path) -> None:
    async with through_envoy(tmp_path, 1, SLOW, {"flowControl": {"maxConcurrentPerPod": 1}}) as s:
        queue = s.app.serving.flow_controls["default"].queue
        async with s.http.post(s.url + CHAT, json=chat_body("Hi", **LONG)) as running:
            await running.content.readline()
            waits = asyncio.ensure_future(s.chat())
            await until(lambda: queue.length == 1)
            await s.app._stop_serving(0.05)
            response, _ = await waits
            assert (response.status, response.headers["x-kvlane-reason"]) == (503, "rejected-shutting-down")
            with pytest.raises(aiohttp.ClientError):
                await running.read()
        await until(lambda: s.app.ledger.in_flight == 0)
