"""Questions of our own to pods, on real sockets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from proxy.core.errors import (
    ConnectFailed,
    ConnectRefused,
    Disconnected,
    InvalidResponse,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import ManualClock
from proxy.http.upstream.pool import FETCH_IDLE_LIMIT, LONGEST, PooledFetcher
from tests.helpers.http.support import Pod, Received, Script, answering, chunk, plain
from tests.helpers.ports import free_port, full_address

PATIENCE = 10.0
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Fetching:
    """A fetcher and the pod that it reads."""

    def __init__(self, fetcher: PooledFetcher, pod: Pod) -> None:
        self.fetcher = fetcher
        self.pod = pod

    async def get(self, path: str = "/metrics", api_key: str | None = None) -> tuple[int, bytes]:
        return await self.fetcher.get(self.pod.endpoint.url + path, api_key)


@asynccontextmanager
async def fetching(
    script: Script, timeout: float = PATIENCE, clock: ManualClock | None = None
) -> AsyncIterator[Fetching]:
    async with Pod(script) as pod, PooledFetcher(timeout, clock or ManualClock()) as fetcher:
        yield Fetching(fetcher, pod)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([plain(b"up 1\n")], (200, b"up 1\n")),
        ([HEAD, b"content-length: 6\r\n\r\n", b"up", b" 12\n"], (200, b"up 12\n")),
        ([HEAD + b"content-length: 0\r\n\r\n"], (200, b"")),
        ([CHUNKED + chunk(b"up ") + chunk(b"1\n") + b"0\r\n\r\n"], (200, b"up 1\n")),
        ([CHUNKED, b"2\r", b"\nup\r\n3", b"\r\n 1\n\r\n0\r\nx: y\r\n", b"\r\n"], (200, b"up 1\n")),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b"")),
        ([b"HTTP/1.1 103 Early Hints\r\n\r\n", plain(b"up")], (200, b"up")),
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno"], (503, b"no")),
        ([b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"], (302, b"")),
    ],
)
@pytest.mark.parametrize("pause", [0.0, 0.005])
async def test_a_complete_response_leaves_its_connection_to_the_next(
    pieces: list[bytes], expected: tuple[int, bytes], pause: float
) -> None:
    async with fetching(answering(*pieces, pause=pause)) as it:
        for _ in range(3):
            assert await it.get() == expected
        assert (it.pod.connections, len(it.pod.requests)) == (1, 3)


@pytest.mark.parametrize("head", [HEAD + b"\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
async def test_a_response_without_a_length_ends_with_the_connection(head: bytes) -> None:
    async def script(request: Received) -> None:
        await request.send(head, b"up ", b"1\n", pause=0.002)
        request.break_off()

    async with fetching(script) as it:
        for count in (1, 2):
            assert await it.get() == (200, b"up 1\n")
            assert it.pod.connections == count


async def test_exactly_the_given_request_is_sent() -> None:
    async with fetching(answering(plain())) as it:
        await it.get("/base/métrics of a pod?format=text&x=%20", "secret")
        await it.get("")
        first, second = it.pod.requests
        assert first.line == b"GET /base/m%C3%A9trics%20of%20a%20pod?format=text&x=%20 HTTP/1.1"
        assert second.line == b"GET / HTTP/1.1"
        assert first.headers == [
            (b"host", it.pod.endpoint.url.removeprefix("http://").encode()),
            (b"user-agent", b"kvlane"),
            (b"accept", b"text/plain, application/json"),
            (b"accept-encoding", b"identity"),
            (b"authorization", b"Bearer secret"),
        ]
        assert not second.all(b"authorization")


async def test_concurrent_requests_do_not_wait_for_each_other() -> None:
    async def script(request: Received) -> None:
        if request.connection == 1:
            await asyncio.sleep(PATIENCE)
        await request.send(plain(b"up"))

    async with fetching(script) as it:
        hanging = asyncio.get_running_loop().create_task(it.get())
        await asyncio.sleep(0.01)
        assert await it.get() == (200, b"up")
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging


async def test_a_dead_idle_connection_is_replaced_by_a_fresh_one() -> None:
    async def script(request: Received) -> None:
        if len(it.pod.requests) == 2:
            request.break_off()
        else:
            await request.send(plain(b"up"))

    async with fetching(script) as it:
        for _ in range(2):
            assert await it.get() == (200, b"up")
        assert (it.pod.connections, len(it.pod.requests)) == (2, 3)


@pytest.mark.parametrize("raw", [b"", b"HTTP/1.1 2", plain()[:-1], CHUNKED + chunk(b"up")])
async def test_a_truncated_response_is_a_failure_and_not_retried(raw: bytes) -> None:
    async def script(request: Received) -> None:
        if raw:
            await request.send(raw)
        request.break_off()

    async with fetching(script) as it:
        with pytest.raises(Disconnected):
            await it.get()
        assert len(it.pod.requests) == 1


async def test_a_reused_connection_that_breaks_in_a_response_is_a_failure() -> None:
    async def script(request: Received) -> None:
        await request.send(plain(b"up") if len(it.pod.requests) == 1 else plain(b"up")[:-1])
        if len(it.pod.requests) == 2:
            request.break_off()

    async with fetching(script) as it:
        await it.get()
        with pytest.raises(Disconnected):
            await it.get()
        assert len(it.pod.requests) == 2


@pytest.mark.parametrize("raw", [b"", CHUNKED + chunk(b"up")])
async def test_a_pod_that_takes_too_long_is_given_up_and_notices(raw: bytes) -> None:
    left = asyncio.Event()

    async def script(request: Received) -> None:
        if request.connection == 1:
            await request.send(raw)
            await request.gone()
            left.set()
        await request.send(plain(b"up"))

    async with fetching(script, timeout=0.05) as it:
        with pytest.raises(UpstreamTimedOut):
            await it.get()
        await asyncio.wait_for(left.wait(), PATIENCE)
        assert await it.get() == (200, b"up")


async def test_a_changed_timeout_applies_to_connecting_too() -> None:
    with full_address() as (host, port):
        async with PooledFetcher(0.01, ManualClock()) as fetcher:
            fetcher.timeout = 0.2
            with pytest.raises(UpstreamFailed, match=r"within 0\.2 s"):
                await fetcher.get(f"http://{host}:{port}/metrics", None)


async def test_a_cancelled_request_closes_its_connection() -> None:
    requested, left = asyncio.Event(), asyncio.Event()

    async def script(request: Received) -> None:
        requested.set()
        await request.gone()
        left.set()

    async with fetching(script) as it:
        question = asyncio.get_running_loop().create_task(it.get())
        await asyncio.wait_for(requested.wait(), PATIENCE)
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        await asyncio.wait_for(left.wait(), PATIENCE)


@pytest.mark.parametrize("head", [HEAD + b"\r\n", HEAD + b"content-length: 999999999\r\n\r\n", CHUNKED])
async def test_an_overlong_response_is_given_up(head: bytes) -> None:
    async def script(request: Received) -> None:
        await request.send(head)
        while True:
            await request.send(chunk(b"x" * 65536) if head is CHUNKED else b"x" * 65536)

    async with fetching(script) as it:
        with pytest.raises(InvalidResponse, match="too long"):
            await it.get()


async def test_a_response_at_the_limit_is_accepted() -> None:
    body = b"x" * LONGEST
    async with fetching(answering(plain(body))) as it:
        assert await it.get() == (200, body)


@pytest.mark.parametrize(
    "raw",
    [
        b"220 mail.example ESMTP\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        HEAD + b"transfer-encoding: gzip\r\n\r\n",
    ],
)
async def test_an_invalid_response_is_a_failure(raw: bytes) -> None:
    async with fetching(answering(raw)) as it:
        with pytest.raises(InvalidResponse):
            await it.get()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_closed_port_is_a_refusal(host: str, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    port = free_port()

    async def ask() -> None:
        async with PooledFetcher(PATIENCE, ManualClock()) as fetcher:
            with pytest.raises(ConnectRefused):
                await fetcher.get(f"http://{host}:{port}/metrics", None)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(ask())


@pytest.mark.parametrize(
    "url",
    [
        "",
        "pod:8000/metrics",
        "http:///metrics",
        "http://pod:port/metrics",
        "http://[::1",
        "http://pod..example/metrics",
        "https://.example/metrics",
        "http://pod/\ud800",
    ],
)
async def test_an_unresolvable_url_is_no_refusal(url: str) -> None:
    async with PooledFetcher(PATIENCE, ManualClock()) as fetcher:
        with pytest.raises(ConnectFailed) as failure:
            await fetcher.get(url, None)
        assert not isinstance(failure.value, ConnectRefused)


async def test_a_connection_is_kept_for_a_rarely_scraped_fleet() -> None:
    clock = ManualClock(100.0)
    async with fetching(answering(plain()), clock=clock) as it:
        await it.get()
        clock.advance(FETCH_IDLE_LIMIT - 1)
        await it.get()
        assert it.pod.connections == 1
        clock.advance(FETCH_IDLE_LIMIT)
        await it.get()
        assert it.pod.connections == 2


async def test_no_connection_stays_after_the_last_request() -> None:
    left = asyncio.Event()

    async def script(request: Received) -> None:
        await request.send(plain())
        await request.gone()
        left.set()

    async with Pod(script) as pod:
        async with PooledFetcher(PATIENCE, ManualClock()) as fetcher:
            await fetcher.get(pod.endpoint.url, None)
        await asyncio.wait_for(left.wait(), PATIENCE)


@pytest.mark.parametrize("trusted", [True, False])
async def test_metrics_behind_https_are_read_if_the_certificate_is_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with Pod(answering(plain(b"up")), context) as pod, PooledFetcher(PATIENCE, ManualClock()) as fetcher:
        for _ in range(2):
            if trusted:
                assert await fetcher.get(pod.endpoint.url + "/metrics", None) == (200, b"up")
            else:
                with pytest.raises(UpstreamFailed):
                    await fetcher.get(pod.endpoint.url + "/metrics", None)
        assert pod.connections == 1 or not trusted


async def test_a_prompt_is_posted_with_its_length_and_key_over_the_open_connection() -> None:
    async def script(request: Received) -> None:
        bodies.append((request.line.split()[0], await request.body(), request.all(b"authorization")))
        await request.send(plain(b"{}"))

    bodies: list[tuple[bytes, bytes, list[bytes]]] = []
    async with fetching(script) as it:
        url = it.pod.endpoint.url + "/v1/chat/completions"
        assert await it.fetcher.post(url, b"x" * 100_000, "key") == (200, b"{}")
        assert await it.fetcher.post(url, b"short", None) == (200, b"{}")
        assert await it.get() == (200, b"{}")
        assert it.pod.connections == 1
    assert bodies == [
        (b"POST", b"x" * 100_000, [b"Bearer key"]),
        (b"POST", b"short", []),
        (b"GET", b"", []),
    ]
