"""Names with several addresses, some of them dead."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager

import pytest
import uvloop
from aiohappyeyeballs import AddrInfoType

from proxy.core.errors import ConnectFailed
from proxy.core.ports import ManualClock
from proxy.http.upstream.pool import UpstreamPool
from tests.helpers.http.support import Pod, answering, plain
from tests.helpers.ports import full_address

PATIENCE = 20.0
"""Seconds: many times what a race takes, less than a kernel takes to give an address up."""


def info(address: Sequence[object]) -> AddrInfoType:
    family = socket.AF_INET6 if ":" in str(address[0]) else socket.AF_INET
    return (family, socket.SOCK_STREAM, 6, "", tuple(address))


@asynccontextmanager
async def silent() -> AsyncIterator[AddrInfoType]:
    """An address that takes no connection and refuses none."""
    with ExitStack() as stack:
        try:
            address = stack.enter_context(full_address("::1"))
        except OSError:
            pytest.skip("no IPv6 loopback here")
        await asyncio.sleep(0.02)
        yield info(address)


async def connect(pod: Pod, *before: AddrInfoType) -> None:
    address = info(("127.0.0.1", int(pod.endpoint.url.rpartition(":")[2])))

    async def resolve(host: str, port: int) -> Sequence[AddrInfoType]:
        assert (host, port) == ("pod.test", 80)
        return [*before, address]

    pool = UpstreamPool(PATIENCE, ManualClock(), resolve)
    connection = await pool.connect(pool["http://pod.test"])
    assert connection.transport.get_extra_info("peername")[1] == address[4][1]
    connection.abort()


async def test_a_pod_with_one_address_is_reached_by_name() -> None:
    async with Pod(answering(plain())) as pod:
        await connect(pod)


async def test_a_pod_is_resolved_like_the_machine_does() -> None:
    async with Pod(answering(plain())) as pod:
        pool = UpstreamPool(PATIENCE, ManualClock())
        connection = await pool.connect(pool[pod.endpoint.url.replace("127.0.0.1", "localhost")])
        assert connection.transport.get_extra_info("peername")[0] == "127.0.0.1"
        connection.abort()


async def test_a_dead_address_costs_less_than_the_connect_timeout() -> None:
    async with silent() as dead, Pod(answering(plain())) as pod, asyncio.timeout(PATIENCE / 4):
        await connect(pod, dead)


def test_a_dead_address_costs_the_same_under_uvloop() -> None:
    async def race() -> None:
        async with silent() as dead, Pod(answering(plain())) as pod, asyncio.timeout(PATIENCE / 4):
            await connect(pod, dead)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(race())


async def test_a_refusing_address_is_skipped_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        refusing = info(unused.getsockname())
    async with Pod(answering(plain())) as pod:
        await connect(pod, refusing)


async def test_an_unknown_name_is_a_failed_connection() -> None:
    async def resolve(host: str, port: int) -> Sequence[AddrInfoType]:
        raise socket.gaierror("unknown")

    pool = UpstreamPool(1.0, ManualClock(), resolve)
    with pytest.raises(ConnectFailed):
        await pool.connect(pool["http://pod.test"])


async def test_a_pod_whose_addresses_are_all_dead_fails_at_the_connect_timeout() -> None:
    async with silent() as dead:

        async def resolve(host: str, port: int) -> Sequence[AddrInfoType]:
            return [dead]

        pool = UpstreamPool(0.1, ManualClock(), resolve)
        with pytest.raises(ConnectFailed):
            await pool.connect(pool["http://pod.test"])


async def test_a_pod_without_tls_is_a_failed_connection() -> None:
    closed = asyncio.Event()

    async def respond_in_clear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(respond_in_clear, "127.0.0.1", 0) as server:
        address = info(server.sockets[0].getsockname())

        async def resolve(host: str, port: int) -> Sequence[AddrInfoType]:
            return [address]

        pool = UpstreamPool(PATIENCE, ManualClock(), resolve)
        with pytest.raises(ConnectFailed):
            await pool.connect(pool["https://pod.test"])
        await asyncio.wait_for(closed.wait(), PATIENCE)
