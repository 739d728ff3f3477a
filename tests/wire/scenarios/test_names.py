"""Names that stand for other models, over real sockets: what the pods get, and what the client sees."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from proxy.lab.sim import SimConfig
from tests.helpers.http.support import SSE_HEAD, event, plain
from tests.helpers.scenarios.stack import CHAT, Stack, running, stack
from tests.helpers.waiting import until
from tests.wire.scenarios.test_audio import SOUND, form, upload
from tests.wire.scenarios.test_transparency import engine, relayed

BIG, SMALL = SimConfig(model="org/big", time_scale=20), SimConfig(model="small", time_scale=20)
NAMES = {"models": {"aliases": {"gpt-4o": "org/big", "whisper-1": "small"}}}
QUESTION = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}


async def events(s: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with s.http.post(s.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, QUESTION),
        ("/v1/completions", {"prompt": "Hello!", "max_tokens": 5}),
        ("/v1/messages", QUESTION),
        ("/v1/responses", {"input": "Hello!", "max_output_tokens": 5}),
    ],
)
async def test_the_response_has_the_requested_name(path: str, body: dict[str, Any]) -> None:
    async with stack(2, [BIG, SMALL], NAMES) as s:
        response, payload = await s.post(path, {"model": "gpt-4o", **body})
        assert (response.status, payload["model"]) == (200, "gpt-4o")
        assert response.headers["x-kvlane-model"] == "org/big"
        assert response.headers["x-kvlane-endpoint"] == "pod-0"
        events_of_alias = await events(s, path, {"model": "gpt-4o", **body})
        objects = [event.get("message") or event.get("response") or event for event in events_of_alias]
        assert {each["model"] for each in objects if "model" in each} == {"gpt-4o"}
        direct, payload = await s.post(path, {"model": "org/big", **body})
        assert payload["model"] == "org/big"
        assert "x-kvlane-model" not in direct.headers


async def test_a_stream_of_an_alias_has_the_events_of_its_model() -> None:
    async with stack(1, [BIG], {**NAMES, "telemetry": {"askForUsage": True}}) as s:
        own = await events(s, CHAT, {"model": "org/big", **QUESTION})
        other = await events(s, CHAT, {"model": "gpt-4o", **QUESTION})
        assert [event["choices"] for event in other] == [event["choices"] for event in own]
        await s.idle()
        s.app.observer.flush()
        assert await s.sample('kvlane_completion_tokens_total{model="org/big"}') == 10
        assert await s.sample('kvlane_model_rewrites_total{model="org/big",rule="alias"}') == 1


async def test_the_pod_gets_its_own_name_and_all_other_bytes_unchanged() -> None:
    sent = b'{ "messages":[{"role":"user","content":"caf\xc3\xa9 \\"model\\":\\"x\\""}], "model" : "gpt" ,"n":1.0e0}'
    bodies: list[bytes] = []
    result = engine(SSE_HEAD + event("x") + event("[DONE]") + b"0\r\n\r\n", bodies=bodies)
    async with relayed(result, body=sent, models={"aliases": {"gpt": "org/big"}}) as (response, _, got):
        assert response.status == 200
        assert bodies == [sent.replace(b'"gpt"', b'"org/big"')]
        assert got.all(b"content-length") == [str(len(bodies[0])).encode()]


async def test_a_pod_with_several_names_gets_the_requested_one_in_its_response() -> None:
    first = event('{"model":"served","choices":[]}')
    pod = engine(SSE_HEAD + first + event("[DONE]") + b"0\r\n\r\n")
    each = [{"models": ["served", "org/big"]}]
    async with pod, running([pod.endpoint.url], {"models": {"aliases": {"gpt": "org/big"}}}, each) as app:
        body = await post(app.port, b'{"model":"gpt","stream":true,"messages":[]}')
        assert body == b'data: {"model":"gpt","choices":[]}\n\ndata: [DONE]\n\n'


async def test_aliases_are_listed_while_their_model_is_served() -> None:
    async with stack(2, [BIG, SMALL], {"models": {"aliases": {"gpt-4o": "org/big", "gone": "nobody"}}}) as s:
        async with s.http.get(s.url + "/v1/models") as response:
            listed = {card["id"]: card for card in (await response.json())["data"]}
        assert set(listed) == {"org/big", "small", "gpt-4o"}
        assert listed["gpt-4o"]["root"] == "org/big"
        for name, status in (("gpt-4o", 200), ("gone", 404)):
            async with s.http.get(f"{s.url}/v1/models/{name}") as response:
                assert response.status == status
        response, body = await s.chat(model="gone")
        assert response.status == 404
        assert "`gone`" in body["error"]["message"]


@pytest.mark.parametrize("sound", [b"short", SOUND])
@pytest.mark.parametrize("file_first", [False, True])
async def test_a_form_reaches_the_model_of_its_alias(sound: bytes, file_first: bool) -> None:
    async with stack(2, [BIG, SMALL], NAMES) as s:
        response, body = await upload(s, form("whisper-1", file_first=file_first, sound=sound))
        assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, "pod-1")
        assert body == {"text": f"{len(sound)} bytes of audio", "usage": {"type": "duration", "seconds": 1}}
        assert {record.model for record in s.pods[1].requests} <= {"small", None, ""}


async def test_traffic_is_split_and_a_header_chooses() -> None:
    rules = [
        {"name": "canary", "model": "prod", "headers": {"x-canary": "yes"}, "targets": [{"model": "small"}]},
        {"model": "prod", "targets": [{"model": "org/big", "weight": 1}, {"model": "small", "weight": 1}]},
    ]
    async with stack(2, [BIG, SMALL], {"models": {"rewrites": rules}}) as s:
        body = {"model": "prod", **QUESTION}
        responses = await asyncio.gather(*(s.post(CHAT, body) for _ in range(24)))
        assert {response.headers["x-kvlane-model"] for response, _ in responses} == {"org/big", "small"}
        responses = await asyncio.gather(*(s.post(CHAT, body, {"x-canary": "yes"}) for _ in range(6)))
        assert {response.headers["x-kvlane-model"] for response, _ in responses} == {"small"}
        assert {result["model"] for _, result in responses} == {"prod"}
        s.app.observer.flush()
        assert await s.sample('kvlane_model_rewrites_total{model="small",rule="canary"}') == 6


FALLBACKS = {"models": {"aliases": {"gpt-4o": "org/big"}, "fallbacks": {"org/big": ["nobody", "small"]}}}


async def test_without_a_pod_for_the_first_model_the_fallback_responds() -> None:
    async with stack(2, [BIG, SMALL], FALLBACKS) as s:
        await s.pods[0].kill()
        await until(lambda: not s.app.fleet.endpoints_for("org/big"))
        for name in ("gpt-4o", "org/big"):
            response, body = await s.post(CHAT, {"model": name, **QUESTION})
            assert (response.status, body["model"]) == (200, name)
            assert response.headers["x-kvlane-model"] == "small"
        assert await s.sample('kvlane_model_fallbacks_total{model="nobody",to="small"}') == 2
        await s.pods[1].kill()
        response, body = await s.post(CHAT, {"model": "gpt-4o", **QUESTION})
        assert response.status in (502, 503)
        assert "small" not in body["error"]["message"]
        await s.idle()


@pytest.mark.parametrize("refusal", [b"429 Too Many Requests", b"503 Service Unavailable"])
async def test_if_the_pods_of_the_first_model_are_full_the_fallback_responds(refusal: bytes) -> None:
    full = engine(b"HTTP/1.1 " + refusal + b"\r\ncontent-length: 2\r\n\r\n{}")
    good = engine(plain(b'{"model":"small"}', b"content-type: application/json\r\n"))
    each = [{"models": ["org/big"]}, {"models": ["small"]}]
    async with full, good, running([full.endpoint.url, good.endpoint.url], FALLBACKS, each) as app:
        assert await post(app.port, b'{"model":"gpt-4o","messages":[]}') == b'{"model":"gpt-4o"}'


async def test_if_flow_control_has_no_capacity_the_fallback_responds() -> None:
    limits = {"flowControl": {"maxConcurrentPerPod": 1, "maxQueued": 0}, **FALLBACKS}
    slow = SimConfig(model="org/big", time_scale=1)
    async with stack(2, [slow, SMALL], limits) as s:
        first = asyncio.ensure_future(s.post(CHAT, {"model": "org/big", **QUESTION, "max_tokens": 400}))
        await until(lambda: bool(s.pods[0].requests.open))
        response, _ = await s.post(CHAT, {"model": "gpt-4o", **QUESTION})
        assert (response.status, response.headers["x-kvlane-model"]) == (200, "small")
        first.cancel()


async def test_a_sleeping_pod_gets_no_requests_and_is_woken_if_configured() -> None:
    async with stack(2, BIG, {"models": {"wake": {"enabled": True}}}) as s:
        await nap(s, 0)
        assert await pods_used(s, 8) == {"pod-1"}
        await nap(s, 1)
        assert len(await pods_used(s, 8)) == 1
        assert sum(pod.engine.sleep_level for pod in s.pods) == 1, "one is enough"
    async with stack(1, BIG) as s:
        await nap(s, 0)
        assert (await s.chat(model="org/big"))[0].status == 503
        assert s.app.fleet.ejection_reasons(s.app.fleet.endpoints[0]) == ["asleep"]


async def post(port: int, body: bytes) -> bytes:
    async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{port}{CHAT}", data=body) as response:
        assert response.status == 200
        return await response.read()


async def nap(s: Stack, pod: int) -> None:
    async with s.http.post(f"{s.pods[pod].url}/sleep?level=1") as response:
        assert response.status == 200
    ready = sum(1 for one in s.pods if not one.engine.sleep_level)
    await until(lambda: len(s.app.fleet.ready) == ready)


async def pods_used(s: Stack, times: int) -> set[str]:
    responses = await asyncio.gather(*(s.chat(f"question {number}", model="org/big") for number in range(times)))
    assert all(response.status == 200 for response, _ in responses)
    return {response.headers["x-kvlane-endpoint"] for response, _ in responses}
