"""Clients that disconnect while one pod computes their prompt and another waits for it: both requests are cancelled,
and no blocks are stranded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from proxy.lab.sim import Fault, FaultKind, SimPod, TransferTiming
from proxy.lab.sim.config import ConnectorName
from tests.helpers.scenarios.disagg import (
    CONNECTORS,
    SIM,
    Received,
    ask,
    decodes,
    disaggregated,
    prefills,
    settled,
    transfers,
)
from tests.helpers.scenarios.stack import Stack
from tests.helpers.waiting import until

SLOW_PREFILL = replace(SIM, max_num_batched_tokens=1, transfer=TransferTiming(failure=1.0, expiry=200.0))
SLOW_TRANSFER = replace(SIM, transfer=TransferTiming(base=4.0, failure=1.0, expiry=200.0))
"""Of 200 ms; unpulled blocks are kept for 10 s, which is longer than `settled` waits."""

KEEPING = replace(SIM, transfer=TransferTiming(failure=1.0, expiry=200.0))

SEQUENTIAL: tuple[ConnectorName, ...] = ("nixl", "shared-storage", "p2p-nccl")


async def leaves(task: asyncio.Task[Received]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def leaves_when(proxy: Stack, condition: Callable[[], bool], *, stream: bool) -> None:
    task = asyncio.create_task(ask(proxy, stream=stream, max_tokens=2000))
    await until(condition)
    await leaves(task)


def some(pods: list[SimPod], what: Callable[[SimPod], object]) -> Callable[[], bool]:
    return lambda: any(what(pod) for pod in pods)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", SEQUENTIAL)
async def test_a_client_that_leaves_during_the_prefill_ends_it_without_a_decode(
    connector: ConnectorName, stream: bool
) -> None:
    async with disaggregated(connector, sim=SLOW_PREFILL) as proxy:
        await leaves_when(proxy, some(prefills(proxy), lambda pod: pod.engine.running), stream=stream)
        await settled(proxy)
        [record] = [record for pod in prefills(proxy) for record in pod.requests]
        assert record.aborted
        assert not any(len(pod.requests) for pod in decodes(proxy))


@pytest.mark.parametrize("connector", ["mooncake", "sglang"])
async def test_a_client_that_leaves_ends_both_attempts(connector: ConnectorName) -> None:
    async with disaggregated(connector, sim=SLOW_PREFILL) as proxy:
        both = some(prefills(proxy), lambda pod: pod.engine.running)
        loading = some(decodes(proxy), lambda pod: pod.engine.loading)
        await leaves_when(proxy, lambda: both() and loading(), stream=True)
        await settled(proxy)
        assert all(record.aborted for pod in proxy.pods for record in pod.requests)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_client_that_leaves_during_the_transfer_strands_no_blocks(
    connector: ConnectorName, stream: bool
) -> None:
    async with disaggregated(connector, sim=SLOW_TRANSFER) as proxy:
        await leaves_when(proxy, some(decodes(proxy), lambda pod: pod.engine.loading), stream=stream)
        await settled(proxy)


def is_between_the_attempts(proxy: Stack) -> bool:
    """The prompt is computed, and the proxy knows it."""
    loads = [endpoint.load for endpoint in proxy.app.fleet.endpoints if endpoint.role == "prefill"]
    return any(load.requests and not load.tokens for load in loads)


@pytest.mark.parametrize("turns", range(0, 45, 3))
async def test_a_client_that_leaves_after_the_prefill_strands_no_blocks(turns: int) -> None:
    """At any time: after so many turns of the loop; the first ones are between the attempts."""
    async with disaggregated(sim=KEEPING) as proxy:
        task = asyncio.create_task(ask(proxy, stream=True, max_tokens=2000))
        while not is_between_the_attempts(proxy):
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await leaves(task)
        await settled(proxy)


async def test_a_client_that_leaves_the_decode_queue_strands_no_blocks() -> None:
    async with disaggregated(sim=replace(KEEPING, max_num_seqs=1), roles=("prefill", "decode")) as proxy:
        first = asyncio.create_task(ask(proxy, stream=True, max_tokens=20_000, request_id="first"))
        await until(some(decodes(proxy), lambda pod: pod.engine.running))
        await leaves_when(proxy, some(decodes(proxy), lambda pod: pod.engine.waiting), stream=True)
        await until(lambda: not any(pod.engine.kept_blocks for pod in prefills(proxy)))
        await leaves(first)
        await settled(proxy)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_client_that_leaves_during_the_stream_ends_the_decode(connector: ConnectorName) -> None:
    async with disaggregated(connector, sim=replace(SIM, time_scale=5)) as proxy:
        await leaves_when(proxy, some(decodes(proxy), lambda pod: pod.engine.stats.generation_tokens > 3), stream=True)
        await settled(proxy)
        assert sum(record.aborted for pod in decodes(proxy) for record in pod.requests) == 1


async def test_a_client_that_leaves_during_a_repeated_prefill_ends_it() -> None:
    async with disaggregated(sim=SLOW_PREFILL) as proxy:
        for pod in prefills(proxy):
            pod.faults.set([Fault(FaultKind.RESET, count=1)])
        prefills(proxy)[1].faults.set(())
        prefills(proxy)[0].faults.set([Fault(FaultKind.RESET)])
        await leaves_when(proxy, some(prefills(proxy), lambda pod: pod.engine.running), stream=True)
        await settled(proxy)
        assert not any(len(pod.requests) for pod in decodes(proxy))


async def test_many_clients_that_leave_at_any_time_strand_no_blocks() -> None:
    """Except clients that leave while the response of the prefill pod is on its way: what it keeps expires."""
    async with disaggregated() as proxy:

        async def comes_and_goes(number: int) -> None:
            task = asyncio.create_task(ask(proxy, stream=True, max_tokens=40, request_id=f"r{number}"))
            await asyncio.wait([task], timeout=0.01 * (number % 40) if number % 5 else None)
            await leaves(task)

        await asyncio.gather(*(comes_and_goes(number) for number in range(60)))
        await settled(proxy, may_expire=True)
        assert 12 <= transfers(proxy) <= 60
