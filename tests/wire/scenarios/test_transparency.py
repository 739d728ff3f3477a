"""What passes through the whole proxy untouched, and what must not: seen by a pod that keeps every byte."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.helpers.http.support import Pod, Received, chunk, plain
from tests.helpers.scenarios.stack import CHAT, running
from tests.helpers.waiting import PATIENCE

BODY = b'{"model":"any","messages":[{"role":"user","content":"Hello!"}]}'
JSON = {"content-type": "application/json"}


def engine(*pieces: bytes, bodies: list[bytes] | None = None) -> Pod:
    """Return a pod without metrics or models that sends these bytes to every request and keeps the `bodies`."""

    async def script(request: Received) -> None:
        body = await request.body()
        path = request.line.split(b" ")[1]
        if path == b"/health":
            await request.send(plain(b""))
        elif path in (b"/metrics", b"/v1/models"):
            await request.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            if bodies is not None:
                bodies.append(body)
            await request.send(*pieces)

    return Pod(script)


@asynccontextmanager
async def relayed(
    pod: Pod, *, path: str = CHAT, body: bytes = BODY, headers: Sequence[tuple[str, str]] = (), **settings: object
) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes, Received]]:
    """Relay one request. Yield the response, its raw body and the request that the pod received."""
    session = aiohttp.ClientSession(auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
    async with pod, running([pod.endpoint.url], settings) as app, session:
        url = f"http://127.0.0.1:{app.port}{path}"
        async with session.post(url, data=body, headers=[*JSON.items(), *headers]) as response:
            raw = await response.read()
        yield response, raw, next(each for each in pod.requests if path.encode() in each.line)


async def test_path_query_cookies_and_custom_headers_arrive_unchanged() -> None:
    sent = [("Cookie", "a=1; b=%20"), ("X-Custom", "One"), ("X-Custom", "Two"), ("Accept-Language", "de;q=0.5")]
    async with relayed(engine(plain()), path=CHAT + "?a=b+c&d", headers=sent) as (_, _, got):
        assert got.line == f"POST {CHAT}?a=b+c&d HTTP/1.1".encode()
        assert got.all(b"cookie") == [b"a=1; b=%20"]
        assert got.all(b"x-custom") == [b"One", b"Two"]
        assert got.all(b"accept-language") == [b"de;q=0.5"]


async def test_several_cookies_and_additional_headers_are_returned() -> None:
    extra = b"set-cookie: a=1; Path=/\r\nset-cookie: b=2\r\nx-engine: yes\r\nconnection: x-hop\r\nx-hop: gone\r\n"
    async with relayed(engine(plain(b"{}", extra))) as (response, _, _):
        assert response.headers.getall("set-cookie") == ["a=1; Path=/", "b=2"]
        assert response.headers["x-engine"] == "yes"
        assert "x-hop" not in response.headers


async def test_a_compressed_response_stays_compressed() -> None:
    body = gzip.compress(b'{"ok": true}')
    async with relayed(engine(plain(body, b"content-encoding: gzip\r\n"))) as (response, raw, _):
        assert response.headers["content-encoding"] == "gzip"
        assert raw == body


async def test_a_binary_response_is_returned_unchanged() -> None:
    body = bytes(range(256)) * 500
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = [chunk(body[at : at + 1000]) for at in range(0, len(body), 1000)]
    speech = b'{"model":"any","input":"the sea","voice":"none"}'
    pod = engine(head, *pieces, b"0\r\n\r\n")
    async with relayed(pod, path="/v1/audio/speech", body=speech) as (_, raw, _):
        assert raw == body


async def test_fields_that_steer_engines_are_removed_from_bodies_and_headers() -> None:
    steering = {"kv_transfer_params": {"remote_host": "evil"}, "bootstrap_host": "evil", "bootstrap_room": 1}
    sent = [("x-prefiller-host-port", "evil:1"), ("X-Data-Parallel-Host-Port", "evil:1")]
    body = json.dumps({**json.loads(BODY), **steering, "temperature": 0.5}).encode()
    seen: list[bytes] = []
    async with relayed(engine(plain(), bodies=seen), body=body, headers=sent) as (_, _, got):
        assert json.loads(seen[0]) == {**json.loads(BODY), "temperature": 0.5}
        assert got.all(b"content-length") == [str(len(seen[0])).encode()]
        assert not any(b"evil" in value for _, value in got.headers)


async def test_a_body_without_such_fields_is_unchanged() -> None:
    body = b'{ "model": "any",\n "messages": [ ], "n": 1.0e0, "text": "kv_transfer_params \\u00e9" }'
    seen: list[bytes] = []
    async with relayed(engine(plain(), bodies=seen), body=body) as (_, _, _):
        assert seen == [body]


@pytest.mark.parametrize(
    ("api_key", "sent", "expected"),
    [
        (None, [], []),
        (None, [("Authorization", "Bearer client")], [b"Bearer client"]),
        ("pods", [("Authorization", "Bearer client")], [b"Bearer pods"]),
        ("pods", [], [b"Bearer pods"]),
        ("pods", [("authorization", "Bearer one"), ("AUTHORIZATION", "Bearer two")], [b"Bearer pods"]),
    ],
)
async def test_at_most_one_authorization_arrives_and_the_pods_own_precedes(
    api_key: str | None, sent: list[tuple[str, str]], expected: list[bytes]
) -> None:
    pod = engine(plain())
    async with pod, running([pod.endpoint.url], each=[{"apiKey": api_key}]) as app, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{app.port}{CHAT}"
        async with session.post(url, data=BODY, headers=[*JSON.items(), *sent]) as response:
            assert response.status == 200
        posts = [request for request in pod.requests if request.line.startswith(b"POST")]
        assert [request.all(b"authorization") for request in posts] == [expected]
        scrapes = [request for request in pod.requests if b"/metrics" in request.line]
        assert {tuple(scrape.all(b"authorization")) for scrape in scrapes} == {
            () if api_key is None else (b"Bearer pods",)
        }


async def test_the_pod_is_not_named_if_disabled() -> None:
    async with relayed(engine(plain()), security={"exposeEndpoint": False}) as (response, _, _):
        assert "x-kvlane-endpoint" not in response.headers


@pytest.mark.parametrize("timeouts", [{"firstByte": "100ms"}, {"request": "100ms"}])
async def test_a_stream_that_does_not_start_is_a_gateway_timeout(timeouts: dict[str, str]) -> None:
    body = BODY[:-1] + b',"stream":true}'
    async with relayed(engine(), body=body, reliability={"timeouts": timeouts}) as (response, raw, got):
        assert response.status == 504
        assert response.headers["x-kvlane-reason"] == "upstream-timed-out"
        assert b"127.0.0.1" not in raw
        async with asyncio.timeout(PATIENCE):
            await got.gone()


async def test_a_stream_that_stalls_ends_with_an_error_event() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    body = BODY[:-1] + b',"stream":true}'
    settings = {"timeouts": {"idle": "100ms"}}
    async with relayed(engine(head, chunk(b'data: {"choices":[]}\n\n')), body=body, reliability=settings) as (
        _,
        raw,
        _,
    ):
        events = raw.decode().split("\n\n")
        assert events[0] == 'data: {"choices":[]}'
        assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "upstream_failed"
        assert "[DONE]" not in raw.decode()
