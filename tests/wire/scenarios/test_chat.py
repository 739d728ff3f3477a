"""One request from client to pod and back, in all its forms."""

import asyncio
import hashlib
import json

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, StepTiming
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.02, per_prefill_token=0.0))
"""20 ms a token: long enough to leave in the middle."""


def body(text: str = "Hello!", **fields: object) -> dict[str, object]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


async def test_a_stream_arrives_event_by_event() -> None:
    async with stack() as s, s.http.post(s.url + CHAT, json=body(stream=True)) as response:
        text = (await response.read()).decode()
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert text.endswith("data: [DONE]\n\n")
        assert response.headers["x-kvlane-endpoint"] in ("pod-0", "pod-1")
        await s.idle()


async def test_the_response_equals_the_pods() -> None:
    async with stack(1) as s:
        headers = {"x-request-id": "same"}
        async with s.http.post(s.url + CHAT, json=body(), headers=headers) as through:
            proxied = json.loads(await through.read())
        async with s.http.post(s.pods[0].url + CHAT, json=body(), headers=headers) as straight:
            direct = json.loads(await straight.read())
        for response in (proxied, direct):
            del response["created"], response["usage"]
        assert proxied == direct


async def test_the_body_reaches_the_pod_unchanged() -> None:
    raw = b'{ "model":"sim",\t"messages": [{"role":"user","content":"\\u00e9"}], "max_tokens": 1, "custom": 1.50 }'
    headers = {"content-type": "application/json"}
    async with stack(1) as s, s.http.post(s.url + CHAT + "?a=%20b&c", data=raw, headers=headers) as response:
        assert response.status == 200
        assert s.pods[0].requests[-1].body_sha256 == hashlib.sha256(raw).hexdigest()


async def test_the_request_id_is_the_clients_everywhere() -> None:
    async with stack(1) as s, s.http.post(s.url + CHAT, json=body(), headers={"X-Request-Id": "mine"}) as response:
        assert response.headers.getall("x-request-id") == ["mine"]
        assert s.pods[0].requests[-1].headers["x-request-id"] == "mine"


async def test_a_request_without_an_id_gets_one_that_the_pod_sees() -> None:
    async with stack(1) as s, s.http.post(s.url + CHAT, json=body()) as response:
        (given,) = response.headers.getall("x-request-id")
        assert given
        assert s.pods[0].requests[-1].headers["x-request-id"] == given


async def test_the_same_prefix_goes_to_the_same_pod_and_is_cached_there() -> None:
    prompt = "the prefix of its prompt is warm " * 200
    async with stack(4) as s:
        first, _ = await s.chat(prompt)
        for _ in range(3):
            response, payload = await s.chat(prompt)
            assert response.headers["x-kvlane-endpoint"] == first.headers["x-kvlane-endpoint"]
            assert payload["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


async def test_an_omitted_model_is_the_only_one() -> None:
    async with stack() as s:
        fields = body()
        del fields["model"]
        async with s.http.post(s.url + CHAT, json=fields) as response:
            assert response.status == 200


async def test_an_unknown_model_is_refused_without_a_request_to_a_pod() -> None:
    async with stack() as s:
        response, payload = await s.chat(model="nope")
        assert response.status == 404
        assert payload["error"]["code"] == "model_not_found"
        assert response.headers["x-kvlane-reason"] == "unknown-model"
        assert not any(len(pod.requests) for pod in s.pods)


@pytest.mark.parametrize("raw", [b"{", b"[]", b'{"model":5,"messages":[]}', b'{"model":"sim","messages":3}', b""])
async def test_bad_bodies_are_refused_and_the_next_request_is_served(raw: bytes) -> None:
    async with stack() as s:
        async with s.http.post(s.url + CHAT, data=raw) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        good, _ = await s.chat()
        assert good.status == 200


async def test_an_error_of_the_pod_is_relayed_unchanged() -> None:
    async with stack(1) as s:
        response, payload = await s.chat(temperature=-1)
        assert response.status == 400
        assert isinstance(payload["error"]["code"], int)
        assert len(s.pods[0].requests) == 1


async def ask(client: aiohttp.ClientSession, url: str, fields: dict[str, object], leave_after: str) -> None:
    async with client.post(url + CHAT, json=fields) as response:
        if leave_after == "token":
            await response.content.readuntil(b"\n\n")
        response.close()


async def cancelled(s: Stack, fields: dict[str, object], leave_after: str) -> float:
    """Opens a connection of its own, leaves at the given moment, and waits until the pod has seen it: so long."""
    loop, before = asyncio.get_running_loop(), sum(pod.requests.aborted for pod in s.pods)
    async with aiohttp.ClientSession() as client:
        task = loop.create_task(ask(client, s.url, fields, leave_after))
        await until(lambda: any(pod.requests.open for pod in s.pods))
        if leave_after == "arrival":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        left = loop.time()
        await until(lambda: sum(pod.requests.aborted for pod in s.pods) > before)
        took = loop.time() - left
        await s.idle()
        return took


@pytest.mark.parametrize(
    ("stream", "leave_after"),
    [(True, "arrival"), (True, "headers"), (True, "token"), (False, "arrival")],
)
async def test_a_client_that_leaves_is_noticed_by_the_pod_within_half_a_second(stream: bool, leave_after: str) -> None:
    async with stack(2, SLOW) as s:
        sent = body(stream=stream, max_tokens=2000)
        assert min([await cancelled(s, sent, leave_after) for _ in range(3)]) < 0.5  # the machine may be slow for once


async def test_a_queued_request_of_a_client_that_left_leaves_the_queue() -> None:
    one_at_a_time = SimConfig(timing=SLOW.timing, max_num_seqs=1)
    async with stack(1, one_at_a_time) as s:
        async with s.http.post(s.url + CHAT, json=body(stream=True, max_tokens=2000)) as running:
            await running.content.readuntil(b"\n\n")
            async with aiohttp.ClientSession() as client:
                waiting = asyncio.get_running_loop().create_task(ask(client, s.url, body(), "answer"))
                await until(lambda: s.app.ledger.in_flight == 2 and len(s.pods[0].requests.open) == 2)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            await until(lambda: s.app.ledger.in_flight == 1 and len(s.pods[0].requests.open) == 1)
        await s.idle()


async def test_a_refusing_pod_costs_the_client_nothing() -> None:
    async with stack(2) as s:
        await s.pods[0].kill()
        statuses = [(await s.chat(f"question {number}"))[0].status for number in range(8)]
        assert statuses == [200] * 8


async def test_without_any_pod_the_error_has_the_reason() -> None:
    async with stack(1) as s:
        await s.pods[0].kill()
        response, payload = await s.chat()
        assert response.status in (502, 503)
        assert s.pods[0].url not in json.dumps(payload)
        await s.idle()


async def test_a_stream_whose_pod_dies_ends_with_an_error_event_and_not_with_done() -> None:
    async with stack(1, SLOW) as s:
        async with s.http.post(s.url + CHAT, json=body(stream=True, max_tokens=2000)) as response:
            await response.content.readuntil(b"\n\n")
            await s.pods[0].kill()
            rest = await response.content.read()
        assert b'"error"' in rest
        assert b"[DONE]" not in rest
        await s.idle()


async def test_a_complete_response_whose_pod_dies_does_not_seem_complete() -> None:
    async with stack(1, SLOW) as s:
        task = asyncio.get_running_loop().create_task(s.chat(max_tokens=2000))
        await until(lambda: bool(s.pods[0].requests.open))
        await s.pods[0].kill()
        response, payload = await task
        assert response.status == 502
        assert "error" in payload
        await s.idle()


async def test_a_request_whose_pod_dies_before_its_response_is_served_by_another() -> None:
    async with stack(2, SLOW) as s:
        task = asyncio.get_running_loop().create_task(s.chat(max_tokens=5))
        await until(lambda: any(pod.requests.open for pod in s.pods))
        victim = next(pod for pod in s.pods if pod.requests.open)
        await victim.kill()
        response, _ = await task
        assert response.status == 200
        assert s.pod(response.headers["x-kvlane-endpoint"]) is not victim
        await s.idle()
