"""Streams whose pod fails in the middle, and that another pod goes on with."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from proxy.lab.sim import Fault, FaultKind, SimConfig, StepTiming
from tests.helpers.http.support import SSE_HEAD, Pod, Received, chunk, plain
from tests.helpers.scenarios.stack import CHAT, Stack, running, stack
from tests.helpers.waiting import until

COMPLETIONS = "/v1/completions"
TOKENS = 8
SLOW = SimConfig(timing=StepTiming(base=0.01))
"""What a pod breaks off before the proxy has read it never was: so events come one by one."""

CONTINUED: Mapping[str, Any] = {
    "reliability": {
        "continuation": {"models": ["si*"]},
        "timeouts": {"idle": "150ms"},
        "breaker": {"failures": 1000},
        "retries": {"attempts": 4},
    }
}
WITH_USAGE = {"stream_options": {"include_usage": True}}
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, HELLO),
    "chat with usage": (CHAT, {**HELLO, **WITH_USAGE}),
    "completion": (COMPLETIONS, {"prompt": "Hello you"}),
    "completion with usage": (COMPLETIONS, {"prompt": "Hello you", **WITH_USAGE}),
}


@pytest.fixture
async def pods() -> AsyncIterator[Stack]:
    async with stack(3, SLOW, CONTINUED) as three:
        yield three


async def stream(s: Stack, url: str, path: str, **fields: Any) -> bytes:
    body = {"model": "sim", "max_tokens": TOKENS, "stream": True, **fields}
    async with s.http.post(url + path, json=body, headers={"x-request-id": "same"}) as response:
        assert response.status == 200
        return unstamped(await response.read())


def unstamped(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', body)


async def cut(s: Stack, fault: Fault, path: str, pods: int = 1, **fields: Any) -> bytes:
    """What a client gets if so many pods meet the fault, each of them once."""
    for pod in s.pods:
        pod.faults.set([fault])
    seen = asyncio.create_task(stream(s, s.url, path, **fields))
    await until(lambda: sum(sum(pod.faults.met) for pod in s.pods) >= pods)
    for pod in s.pods:
        if not sum(pod.faults.met):
            pod.faults.set([])
    return await seen


def text(body: bytes) -> str:
    output = ""
    for line in body.decode().split("\n\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                output += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return output


@pytest.mark.parametrize("case", BODIES)
async def test_a_stream_cut_after_any_event_has_the_bytes_of_an_uncut_one(pods: Stack, case: str) -> None:
    path, fields = BODIES[case]
    expected = await stream(pods, pods.pods[0].url, path, **fields)
    events = expected.count(b"\n\n")
    for sent in range(1, events):
        assert await cut(pods, Fault(FaultKind.RESET, count=1, events=sent), path, **fields) == expected
    assert await pods.sample("kvlane_continuations_total") == events - 1


@pytest.mark.parametrize("kind", [FaultKind.FIN, FaultKind.MISFRAME, FaultKind.HANG])
async def test_a_stream_continues_after_any_failure_of_its_pod(pods: Stack, kind: FaultKind) -> None:
    expected = await stream(pods, pods.pods[0].url, CHAT, **HELLO)
    assert await cut(pods, Fault(kind, count=1, events=4), CHAT, **HELLO) == expected


async def test_a_crash_under_many_streams_interrupts_none(pods: Stack) -> None:
    expected = await stream(pods, pods.pods[0].url, CHAT, **HELLO)
    streams = [asyncio.create_task(stream(pods, pods.url, CHAT, **HELLO)) for _ in range(12)]
    await until(lambda: all(not pod.requests.idle.is_set() for pod in pods.pods))
    await asyncio.sleep(0.05)
    await pods.pods[0].kill()
    assert await asyncio.gather(*streams) == [expected] * len(streams)
    await pods.idle()


async def test_a_stream_continues_as_often_as_attempts_allow(pods: Stack) -> None:
    expected = await stream(pods, pods.pods[0].url, CHAT, **HELLO)
    assert await cut(pods, Fault(FaultKind.RESET, count=1, events=2), CHAT, pods=3, **HELLO) == expected
    await pods.idle()
    pods.app.observer.flush()
    attempts = [
        await pods.sample(f'kvlane_attempts_total{{ending="upstream-failed",endpoint="pod-{n}"}}') for n in range(3)
    ]
    assert attempts == [1, 1, 1]
    assert await pods.sample("kvlane_continuations_total") == 3
    assert await pods.sample('kvlane_time_to_first_token_seconds_count{model="sim",stream="true"}') == 1


async def test_the_clients_model_name_and_usage_apply_to_the_rest() -> None:
    settings = {**CONTINUED, "telemetry": {"askForUsage": True}, "models": {"aliases": {"gpt": "sim"}}}
    async with stack(3, SLOW, settings) as pods:
        expected = (await stream(pods, pods.pods[0].url, CHAT, **HELLO)).replace(b'"model":"sim"', b'"model":"gpt"')
        for sent in range(1, expected.count(b"\n\n")):
            fault = Fault(FaultKind.RESET, count=1, events=sent)
            assert await cut(pods, fault, CHAT, **{**HELLO, "model": "gpt"}) == expected


async def test_an_http_10_client_gets_the_rest(pods: Stack) -> None:
    expected = await stream(pods, pods.pods[0].url, CHAT, **HELLO)
    for pod in pods.pods:
        pod.faults.set([Fault(FaultKind.RESET, count=1, events=3)])
    body = json.dumps({"model": "sim", "max_tokens": TOKENS, "stream": True, **HELLO}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", pods.app.port)
    fields = "x-request-id: same\r\ncontent-type: application/json\r\n"
    writer.write(f"POST {CHAT} HTTP/1.0\r\n{fields}content-length: {len(body)}\r\n\r\n".encode() + body)
    raw = await reader.read()
    writer.close()
    assert unstamped(raw.partition(b"\r\n\r\n")[2]) == expected


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"seed": 1}, {"response_format": {"type": "json_object"}}, {"model": "lora"}], ids=str
)
async def test_a_stream_that_cannot_continue_ends_with_an_error(fields: dict[str, Any]) -> None:
    async with stack(3, replace(SLOW, lora_adapters=("lora",)), CONTINUED) as pods:
        seen = await cut(pods, Fault(FaultKind.RESET, count=1, events=3), CHAT, **{**HELLO, **fields})
        assert seen.count(b'data: {"error"') == 1
        assert seen.split(b"\n\n")[-2].startswith(b'data: {"error"')
        assert not await pods.sample("kvlane_continuations_total")


async def test_when_is_idle_the_stream_ends_with_an_error_event(pods: Stack) -> None:
    seen = asyncio.create_task(stream(pods, pods.url, CHAT, **{**HELLO, "max_tokens": 1000}))
    await until(lambda: any(not pod.requests.idle.is_set() for pod in pods.pods))
    await asyncio.sleep(0.1)
    for pod in pods.pods:
        await pod.kill()
    body = await seen
    assert text(body)
    assert body.count(b'data: {"error":{"message":"No pod continued the response; tried ') == 1
    assert b"This response is incomplete." in body
    assert b"[DONE]" not in body
    await until(lambda: not pods.app.ledger.in_flight)
    pods.app.observer.flush()
    ended = 'kvlane_requests_total{model="sim",outcome="upstream-failed",path="chat",status="2xx"}'
    assert await pods.sample(ended) == 1


async def test_the_rest_is_not_requested_after_the_client_has_left(pods: Stack) -> None:
    for pod in pods.pods:
        pod.faults.set([Fault(FaultKind.HANG, events=3)])
    body = {"model": "sim", "max_tokens": TOKENS, "stream": True, **HELLO}
    async with pods.http.post(pods.url + CHAT, json=body) as response:
        await response.content.readuntil(b"\n\n")
    await pods.idle()
    assert sum(sum(pod.faults.met) for pod in pods.pods) == 1


def spoken(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
DEAD = b'data: {"error":{"message":"EngineCore encountered an issue","type":"InternalServerError","code":500}}\n\n'
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
REST = SSE_HEAD + chunk(spoken(" and rest")) + END


async def posted(request: Received) -> bytes | None:
    """Return the body of a POST. Respond to other requests, as a healthy pod without metrics and models."""
    body = await request.body()
    if not request.line.startswith(b"GET"):
        return body
    await request.send(plain(b"") if b"/health" in request.line else NOT_FOUND)
    return None


async def between(first: tuple[bytes, ...], second: bytes, **fields: Any) -> tuple[bytes, list[bytes]]:
    """Let the first pod fail. Return the client's bytes and the bodies that the second pod received."""
    bodies: list[bytes] = []
    posts: list[bytes] = []

    async def script(request: Received) -> None:
        body = await posted(request)
        if body is None:
            return
        posts.append(body)
        if len(posts) > 1:
            bodies.append(body)
            await request.send(second)
        else:
            await request.send(*first, pause=0.02)
            request.break_off()

    settings = {"reliability": {"continuation": {"models": ["*"]}}}
    a, b = Pod(script), Pod(script)
    async with a, b, running([a.endpoint.url, b.endpoint.url], settings) as app, aiohttp.ClientSession() as http:
        payload = {"model": "m", "stream": True, "messages": [], **fields}
        async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json=payload) as response:
            return await response.read(), bodies


async def test_nothing_of_an_incomplete_event_is_sent() -> None:
    begun = chunk(spoken("one"))
    for piece in (chunk(spoken(" lost")[:20]), chunk(spoken(" lost"))[:-3], b"zz\r\n" + begun):
        seen, (body,) = await between((SSE_HEAD + begun, piece), REST)
        assert seen == spoken("one") + spoken(" and rest") + b"data: [DONE]\n\n"
        assert json.loads(body)["messages"][-1]["content"] == "one"


def sized(body: bytes, missing: int = 0) -> bytes:
    """Return a response of a declared length that lacks the last `missing` bytes."""
    length = b"content-length: %d\r\n" % (len(body) + missing)
    return SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", length) + body


async def test_a_stream_of_declared_length_is_continued_by_another_one() -> None:
    rest = sized(spoken(" and rest") + b"data: [DONE]\n\n")
    seen, (body,) = await between((sized(spoken("one"), 1000), spoken(" lost")[:20]), rest)
    assert seen == spoken("one") + spoken(" and rest") + b"data: [DONE]\n\n"
    assert json.loads(body)["messages"][-1]["content"] == "one"


async def test_a_complete_event_in_an_incomplete_chunk_is_sent_and_not_requested_again() -> None:
    seen, (body,) = await between((SSE_HEAD + chunk(spoken("one")), chunk(spoken(" two"))[:-2]), REST)
    assert seen == spoken("one") + spoken(" two") + spoken(" and rest") + b"data: [DONE]\n\n"
    assert json.loads(body)["messages"][-1]["content"] == "one two"


async def test_events_of_several_tokens_count_their_tokens() -> None:
    """As engines send them that speculate, or are under pressure."""

    def so_far(event: bytes, prompt: int, tokens: int) -> bytes:
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
        return chunk(event.replace(b"]", b'],"usage":%b' % json.dumps(usage).encode()))

    begun = so_far(spoken("one two three"), 5, 3)
    end = so_far(spoken(" four five"), 8, 2) + so_far(b'data: {"id":"y","choices":[]}\n\n', 8, 2)
    limit = {"max_tokens": 5, "stream_options": {"include_usage": True}}
    seen, (body,) = await between((SSE_HEAD + begun,), SSE_HEAD + end + END, **limit)
    first, second, usage, _, _ = seen.split(b"\n\n")
    assert (first + b"\n\n", second + b"\n\n") == (spoken("one two three"), spoken(" four five"))
    assert json.loads(usage[6:])["usage"] == {"prompt_tokens": 5, "total_tokens": 10, "completion_tokens": 5}
    payload = json.loads(body)
    assert payload["max_tokens"] == 2
    assert payload["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_an_engine_that_reports_its_death_in_the_stream_is_left() -> None:
    begun = chunk(spoken("one"))
    aborted = chunk(spoken("").replace(b":null}", b':"abort"}'))
    cut = (chunk(DEAD)[:20], chunk(DEAD)[20:] + END)
    for last in ((chunk(DEAD), END), (chunk(DEAD) + END,), cut, (aborted, END), (aborted + END,)):
        seen, _ = await between((SSE_HEAD + begun, *last), REST)
        assert seen == spoken("one") + spoken(" and rest") + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "second",
    [
        REFUSED,
        SSE_HEAD.replace(b"text/event-stream", b"text/plain") + END,
        b"nonsense\r\n\r\n",
        SSE_HEAD + chunk(DEAD),
        SSE_HEAD + b"0\r\n\r\n",
    ],
)
async def test_a_rest_that_does_not_fit_is_not_sent(second: bytes) -> None:
    seen, bodies = await between((SSE_HEAD + chunk(spoken("one")),), second)
    events = seen.split(b"\n\n")
    assert events[0] + b"\n\n" == spoken("one")
    assert (len(events), json.loads(events[1][6:])["error"]["code"]) == (3, "upstream_failed")
    assert bodies


@pytest.mark.parametrize("breaks", [False, True], ids=["from a healthy pod", "while another pod is asked for the rest"])
async def test_a_stream_whose_time_limit_passes_is_not_continued(breaks: bool) -> None:
    posts: list[bytes] = []

    async def script(request: Received) -> None:
        body = await posted(request)
        if body is None:
            return
        posts.append(body)
        if len(posts) == 1:
            await request.send(SSE_HEAD + chunk(spoken("one")), pause=0.02)
            if breaks:
                request.break_off()
                return
        await request.gone()

    settings = {"reliability": {"continuation": {"models": ["*"]}}}
    a, b = Pod(script), Pod(script)
    async with a, b, running([a.endpoint.url, b.endpoint.url], settings) as app, aiohttp.ClientSession() as http:
        payload = {"model": "m", "stream": True, "messages": []}
        headers = {"x-request-timeout-ms": "300"}
        async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json=payload, headers=headers) as response:
            events = (await response.read()).split(b"\n\n")
    assert events[0] + b"\n\n" == spoken("one")
    assert len(events) == 3
    assert json.loads(events[1][6:])["error"]["message"].startswith("The time limit of the request passed;")
    assert len(posts) == 1 + breaks
