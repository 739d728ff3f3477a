"""Connections to pods: kept, reused, found broken, and forgotten."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from proxy.core.attempt import Ending
from proxy.core.endpoint import Endpoint, update
from proxy.core.errors import Disconnected
from proxy.core.ports import ManualClock
from proxy.http.upstream.connection import PodConnection, Receiver
from proxy.http.upstream.pool import IDLE_LIMIT, QUIET_REAPS, PodAddress, UpstreamPool
from tests.helpers.http.support import Pod, Received, Script, answering, plain, post, rig
from tests.helpers.waiting import until


async def keep(pod: Pod, pool: UpstreamPool, count: int = 1) -> list[PodConnection]:
    """Idle connections, as if responses had ended on them."""
    connections = [await pool.connect(pool[pod.endpoint.url]) for _ in range(count)]
    for connection in connections:
        connection._release(connection)
    return connections


async def test_requests_share_connections_and_parallel_ones_do_not() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await asyncio.sleep(0.05)
        await request.send(plain())

    async with Pod(script) as pod, rig(pod) as port:
        await port.ask(post())
        await port.ask(post())
        assert pod.connections == 1
        await asyncio.gather(*(port.ask(post()) for _ in range(3)))
        assert pod.connections == 3


@pytest.mark.parametrize(
    "raw",
    [
        plain(extra=b"connection: close\r\n"),
        plain().replace(b"HTTP/1.1", b"HTTP/1.0"),
        plain() + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        plain() + b"rubbish",
    ],
)
async def test_a_connection_that_cannot_be_trusted_is_not_used_again(raw: bytes) -> None:
    async with Pod(answering(raw)) as pod, rig(pod) as port:
        for _ in range(2):
            assert (await port.ask(post())).body == b'{"ok":true}'
        assert pod.connections == 2


async def test_a_reused_connection_that_breaks_under_a_request_is_replaced_once() -> None:
    async def script(request: Received) -> None:
        await request.body()
        if request.connection == 1 and len(pod.requests) > 1:
            request.break_off()
            return
        await request.send(plain())

    async with Pod(script) as pod, rig(pod, clock=ManualClock()) as port:
        for _ in range(2):
            assert (await port.ask(post())).status == 200
        assert pod.connections == 2
        assert len(port.gateway.attempts) == 2
        assert (port.attempt.ending, port.attempt.error) == (Ending.COMPLETE, "")


def breaking_off_kept_ones(clock: ManualClock, seconds: float = 0.0) -> Script:
    """Breaks off, so many seconds after it came, what is not the first request of its connection."""
    seen: set[asyncio.StreamWriter] = set()

    async def script(request: Received) -> None:
        await request.body()
        if request.writer in seen:
            clock.advance(seconds)
            request.break_off()
            return
        seen.add(request.writer)
        await request.send(plain())

    return script


async def test_a_pod_that_closes_a_reused_connection_after_a_while_has_had_the_request() -> None:
    clock = ManualClock()
    async with Pod(breaking_off_kept_ones(clock, 0.02)) as pod, rig(pod, clock=clock) as port:
        assert (await port.ask(post())).status == 200
        assert (await port.ask(post())).status == 502
        assert (len(pod.requests), pod.connections) == (2, 1)


async def test_a_request_is_repeated_for_a_closing_connection_only_once() -> None:
    clock = ManualClock()

    async def busy_once(request: Received) -> None:
        """Its first connection is kept, and then found closing; on the second one the pod hangs up."""
        await request.body()
        if request.connection == 1 and len(first.requests) == 1:
            await request.send(plain())
        else:
            request.break_off()

    second_script = breaking_off_kept_ones(clock)
    async with Pod(busy_once) as first, Pod(second_script) as second, rig(first, second, clock=clock) as port:
        assert (await port.ask(post())).status == 200
        port.gateway.pods = [second.endpoint]
        assert (await port.ask(post())).status == 200
        port.gateway.pods = [first.endpoint, second.endpoint]
        assert (await port.ask(post())).status == 502
        assert (len(first.requests), len(second.requests)) == (3, 2)


async def test_a_pod_unreachable_after_its_connection_breaks_has_had_the_request() -> None:
    clock = ManualClock()

    async def dies(request: Received) -> None:
        await request.body()
        if len(pod.requests) == 1:
            await request.send(plain())
        else:
            pod.close()
            request.break_off()

    async with Pod(dies) as pod, rig(pod, clock=clock) as port:
        assert (await port.ask(post())).status == 200
        assert (await port.ask(post())).status == 502
        assert isinstance(port.gateway.failure, Disconnected)


async def test_a_fresh_connection_that_breaks_is_a_failure_of_the_pod() -> None:
    async def script(request: Received) -> None:
        await request.body()
        request.break_off()

    async with Pod(script) as pod, rig(pod) as port:
        assert (await port.ask(post())).status == 502
        assert len(pod.requests) == 1


async def test_a_reused_connection_that_breaks_after_a_byte_is_a_failure_of_the_pod() -> None:
    async def script(request: Received) -> None:
        await request.body()
        if len(pod.requests) > 1:
            await request.send(b"HTTP/1.1 2")
            request.break_off()
        else:
            await request.send(plain())

    async with Pod(script) as pod, rig(pod) as port:
        await port.ask(post())
        assert (await port.ask(post())).status == 502
        assert len(pod.requests) == 2


async def test_a_connection_closed_while_idle_is_noticed() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await port.ask(post())
        pod.requests[0].writer.transport.abort()
        await asyncio.sleep(0.02)
        assert port.server.upstream[pod.endpoint.url].acquire() is None


class FullClient(Receiver):
    """Accepts a response, and its buffer is full when the last of it comes."""

    def __init__(self, connection: PodConnection) -> None:
        self._connection = connection

    def received(self, raw: bytes) -> None:
        raise AssertionError("the response comes in one read")

    def finished(self, raw: bytes, exact: bool) -> None:
        self._connection.pause_reading()


async def test_a_connection_whose_response_ended_while_paused_is_reused() -> None:
    pool = UpstreamPool(1.0, ManualClock())
    async with Pod(answering(plain())) as pod:
        connection = await pool.connect(pool[pod.endpoint.url])
        connection.send(FullClient(connection), b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", b"")
        await until(lambda: pool[pod.endpoint.url].acquire() is connection)
        assert connection.transport.is_reading()
        pool.forget(pod.endpoint.url)
        connection.abort()


async def test_a_pod_that_sends_unrequested_bytes_loses_the_connection() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await port.ask(post())
        pod.requests[0].writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await asyncio.sleep(0.02)
        assert port.server.upstream[pod.endpoint.url].acquire() is None


async def test_a_long_idle_connection_is_closed() -> None:
    clock = ManualClock(100.0)
    pool = UpstreamPool(1.0, clock)
    async with Pod(answering(plain())) as pod:
        (old,) = await keep(pod, pool)
        clock.advance(IDLE_LIMIT / 2)
        (fresh,) = await keep(pod, pool)
        clock.advance(IDLE_LIMIT / 2)
        pool.reap()
        assert old.transport.is_closing()
        assert pool[pod.endpoint.url].acquire() is fresh
        fresh._release(fresh)
        clock.advance(IDLE_LIMIT)
        assert pool[pod.endpoint.url].acquire() is None
        assert fresh.transport.is_closing()


async def test_connections_of_a_removed_pod_close_now_or_when_they_return() -> None:
    pool = UpstreamPool(1.0, ManualClock())
    async with Pod(answering(plain())) as pod:
        idle, busy = await keep(pod, pool, 2)
        assert pool[pod.endpoint.url].acquire() is busy
        pool.forget(pod.endpoint.url)
        pool.forget(pod.endpoint.url)
        assert idle.transport.is_closing()
        assert not busy.transport.is_closing()
        busy._release(busy)
        assert busy.transport.is_closing()
        assert pool[pod.endpoint.url].acquire() is None


async def test_a_pod_without_recent_requests_is_dropped_and_found_again() -> None:
    pool = UpstreamPool(1.0, ManualClock())
    async with Pod(answering(plain())) as pod:
        (busy,) = await keep(pod, pool)
        assert pool[pod.endpoint.url].acquire() is busy
        for _ in range(QUIET_REAPS + 1):
            assert pod.endpoint.url in pool
            pool.reap()
        assert not pool
        assert not busy.transport.is_closing()
        busy._release(busy)
        assert busy.transport.is_closing()
        assert pool[pod.endpoint.url].acquire() is None


def test_addresses_are_read_from_urls() -> None:
    assert PodAddress.of("http://vllm-0:8000") == PodAddress("vllm-0", 8000, False, b"vllm-0:8000", b"")
    assert PodAddress.of("https://a.example/base/") == PodAddress("a.example", 443, True, b"a.example", b"/base")
    assert PodAddress.of("http://[::1]:80") == PodAddress("::1", 80, False, b"[::1]:80", b"")
    assert PodAddress.of("http://user:pw@host") == PodAddress("host", 80, False, b"host", b"")
    for wrong in ("", "vllm-0:8000", "ftp://a", "http://", "http://a:port"):
        with pytest.raises(ValueError):
            PodAddress.of(wrong)


async def test_an_endpoint_that_moved_is_reached_at_its_new_address() -> None:
    async with Pod(answering(plain(b"old"))) as old, Pod(answering(plain(b"new"))) as new, rig(old.endpoint) as port:
        assert (await port.ask(post())).body == b"old"
        update(old.endpoint, url=new.endpoint.url)
        assert (await port.ask(post())).body == b"new"
        assert (old.connections, new.connections) == (1, 1)


async def test_a_pod_on_ipv6_is_reached() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(plain())
        writer.close()
        await writer.wait_closed()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 loopback here")
    endpoint = Endpoint("six", f"http://[::1]:{server.sockets[0].getsockname()[1]}")
    async with server, rig(endpoint) as port:
        assert (await port.ask(post(body=b"{}"))).status == 200


@pytest.mark.parametrize(("trusted", "status"), [(True, 200), (False, 502)])
async def test_a_pod_behind_https_is_reached_if_its_certificate_is_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool, status: int
) -> None:
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with Pod(answering(plain()), context) as pod, rig(pod) as port:
        for _ in range(2):
            assert (await port.ask(post())).status == status
        assert len(pod.requests) == (2 if trusted else 0)
        assert not trusted or pod.connections == 1


async def test_a_pod_that_responds_without_reading_the_request_loses_the_connection() -> None:
    async def script(request: Received) -> None:
        await request.send(plain(b"no").replace(b"200 OK", b"429 Busy"))
        if request.connection == 1:
            await asyncio.sleep(30)

    large = b'{"x":"' + b"y" * 16_000_000 + b'"}'
    async with Pod(script) as pod, rig(pod) as port:
        assert (await port.ask(post(body=large))).status == 429
        assert (await port.ask(post(body=b""))).status == 429
        assert pod.connections == 2
