"""Prefill and decode pods that fail: what clients see of it, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from proxy.lab.sim import Fault, FaultKind, SimPod, TransferTiming
from proxy.lab.sim.config import ConnectorName, Role
from proxy.openai.bodies import MOST_VALUES
from tests.helpers.scenarios.disagg import (
    CONNECTORS,
    SIM,
    ask,
    decodes,
    disaggregated,
    meet,
    prefills,
    settled,
    transfers,
    whole_text,
)
from tests.helpers.scenarios.stack import CHAT, Stack
from tests.helpers.waiting import until

FAULTS = [
    Fault(FaultKind.REJECT, status=429),
    Fault(FaultKind.REJECT, status=500),
    Fault(FaultKind.REJECT, status=502),
    Fault(FaultKind.REJECT, status=503),
    Fault(FaultKind.RESET),
    Fault(FaultKind.FIN),
    Fault(FaultKind.GARBAGE),
    Fault(FaultKind.MISFRAME),
    Fault(FaultKind.HANG),
    Fault(FaultKind.ERROR_FIRST),
    Fault(FaultKind.LOST_TRANSFER),
    Fault(FaultKind.CRASH, seconds=0.5),
    Fault(FaultKind.KILLED, seconds=0.5),
    Fault(FaultKind.FROZEN, seconds=1.0),
    Fault(FaultKind.LOADING, seconds=0.5),
    Fault(FaultKind.SHUTTING_DOWN, seconds=0.5),
    Fault(FaultKind.ENGINE_DEAD, seconds=0.5),
    Fault(FaultKind.REFUSE, seconds=0.5),
    Fault(FaultKind.DRIP),
    Fault(FaultKind.SLOW_START, seconds=0.5),
    Fault(FaultKind.SLOW_TRANSFER),
]
IN_ONE_PIECE = [
    Fault(FaultKind.RESET, events=1),
    Fault(FaultKind.FIN, events=1),
    Fault(FaultKind.HANG, events=1),
    Fault(FaultKind.MISFRAME, events=1),
    Fault(FaultKind.CORRUPT),
]
"""Cut a response that is not streamed, as of a prefill pod, in half. The lost half names its blocks, so they expire."""

BRIEF = "300ms"
BRIEFLY_KEPT = replace(SIM, transfer=TransferTiming(failure=1.0, expiry=10.0))
"""For half a second."""

WITHOUT_A_BOUND = (FaultKind.HANG, FaultKind.FROZEN, FaultKind.KILLED, FaultKind.MISFRAME)
"""A complete response that does not begin is bounded by the request's time only."""

MEETS_WHOLE: tuple[ConnectorName, ...] = ("nixl", "shared-storage", "mooncake")
"""Connectors under which every pod can do all of a request."""


def named(fault: Fault) -> str:
    return f"{fault.kind.value}{f' {fault.status}' * (fault.kind is FaultKind.REJECT)}{' half' * bool(fault.events)}"


@pytest.mark.parametrize("dead", range(4))
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_dead_pod_does_not_affect_clients(connector: ConnectorName, dead: int) -> None:
    async with disaggregated(connector) as proxy:
        await proxy.pods[dead].kill()
        for number in range(3):
            received = await ask(proxy, stream=number != 1, request_id=f"r{number}")
            assert (received.status, received.is_whole, received.error) == (200, True, "")
        assert received.text == await whole_text()
        await settled(proxy)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", [*FAULTS, *IN_ONE_PIECE], ids=named)
async def test_a_failed_prefill_is_repeated_elsewhere(fault: Fault, stream: bool) -> None:
    """On one of the two pods first; if the other one is met by the fault, too, the decode pod does all. A request under
    which both crash is refused, as any under which two pods die."""
    async with disaggregated(sim=BRIEFLY_KEPT, patience=BRIEF) as proxy:
        meet(prefills(proxy)[:1] if fault.kind is FaultKind.CRASH else prefills(proxy), fault)
        expected = await whole_text()
        for number in range(3):
            received = await ask(proxy, stream=stream, request_id=f"r{number}")
            assert (received.status, received.is_whole, received.text) == (200, True, expected)
        assert any(sum(pod.faults.met) for pod in prefills(proxy))
        await settled(proxy, may_expire=True)


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(fault, stream) for fault in FAULTS for stream in (True, False) if stream or fault.kind not in WITHOUT_A_BOUND],
    ids=lambda value: named(value) if isinstance(value, Fault) else str(value),
)
async def test_a_decode_that_fails_before_its_first_byte_is_repeated_elsewhere(fault: Fault, stream: bool) -> None:
    async with disaggregated(sim=BRIEFLY_KEPT, patience=BRIEF) as proxy:
        meet(decodes(proxy)[:1], fault)
        expected = await whole_text()
        for number in range(3):
            received = await ask(proxy, stream=stream, request_id=f"r{number}")
            assert (received.status, received.is_whole, received.text) == (200, True, expected)
        assert sum(decodes(proxy)[0].faults.met)
        await settled(proxy, may_expire=True)


@pytest.mark.parametrize("failing", [prefills, decodes])
@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.CRASH, FaultKind.LOST_TRANSFER])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_failed_attempt_is_repeated_elsewhere_with_every_connector(
    connector: ConnectorName, kind: FaultKind, failing: Callable[[Stack], list[SimPod]]
) -> None:
    async with disaggregated(connector, sim=BRIEFLY_KEPT, patience=BRIEF) as proxy:
        meet(failing(proxy)[:1], Fault(kind, seconds=0.5))
        for number in range(3):
            received = await ask(proxy, stream=True, request_id=f"r{number}")
            assert (received.status, received.is_whole, received.error) == (200, True, "")
        await settled(proxy, may_expire=True)


SLOW_TRANSFER = replace(SIM, transfer=TransferTiming(base=4.0, failure=1.0, expiry=30.0))
"""Of 200 ms."""


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prefill_pod_that_dies_between_the_attempts_is_replaced(stream: bool) -> None:
    async with disaggregated(sim=SLOW_TRANSFER) as proxy:
        task = asyncio.create_task(ask(proxy, stream=stream))
        await until(lambda: any(pod.engine.loading for pod in decodes(proxy)))
        [holder] = [pod for pod in prefills(proxy) if pod.engine.kept]
        await holder.kill()
        received = await task
        assert (received.status, received.is_whole, received.text) == (200, True, await whole_text())
        await settled(proxy)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_decode_pod_that_dies_during_the_transfer_is_replaced(stream: bool) -> None:
    async with disaggregated(sim=SLOW_TRANSFER) as proxy:
        task = asyncio.create_task(ask(proxy, stream=stream))
        await until(lambda: any(pod.engine.loading for pod in decodes(proxy)))
        [fetching] = [pod for pod in decodes(proxy) if pod.engine.loading]
        await fetching.kill()
        received = await task
        assert (received.status, received.is_whole, received.text) == (200, True, await whole_text())
        await settled(proxy, may_expire=True)


async def test_a_decode_pod_that_never_got_the_request_leaves_the_prompt_to_the_next() -> None:
    async with disaggregated() as proxy:
        for pod in decodes(proxy)[:1]:
            await pod.kill()
        for number in range(4):
            assert (await ask(proxy, stream=True, request_id=f"r{number}")).is_whole
        assert sum(len(pod.requests) for pod in prefills(proxy)) == 4
        await settled(proxy)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_prefill_pod_that_dies_after_the_first_byte_has_no_effect(connector: ConnectorName) -> None:
    async with disaggregated(connector) as proxy:
        task = asyncio.create_task(ask(proxy, stream=True, max_tokens=200))
        await until(lambda: any(pod.engine.stats.generation_tokens > 5 for pod in decodes(proxy)))
        for pod in prefills(proxy):
            await pod.kill()
        received = await task
        assert (received.status, received.is_whole) == (200, True)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.FIN, FaultKind.MISFRAME])
async def test_a_decode_pod_that_fails_during_a_stream_gives_an_error_event(kind: FaultKind) -> None:
    slow = replace(SIM, time_scale=1.0, transfer=TransferTiming())
    async with disaggregated(sim=slow, patience=BRIEF) as proxy:
        meet(decodes(proxy), Fault(kind, events=3))
        received = await ask(proxy, stream=True, max_tokens=100)
        assert (received.status, received.is_whole) == (200, False)
        assert received.error
        await settled(proxy)


async def test_another_pod_continues_the_stream_of_a_dead_one() -> None:
    slow = replace(SIM, time_scale=1.0, transfer=TransferTiming())
    async with disaggregated(sim=slow, patience=BRIEF, continued=["*"]) as proxy:
        meet(decodes(proxy)[:1], Fault(FaultKind.HANG, events=5))
        meet(decodes(proxy)[1:], Fault(FaultKind.HANG, events=5))
        received = await ask(proxy, stream=True, max_tokens=40)
        expected = await whole_text(max_tokens=40)
        assert sum(sum(pod.faults.met) for pod in decodes(proxy)) >= 1
        assert (received.status, received.is_whole, received.text) == (200, True, expected)
        await settled(proxy)


@pytest.mark.parametrize("connector", MEETS_WHOLE)
async def test_without_prefill_pods_the_decode_pods_do_all(connector: ConnectorName) -> None:
    async with disaggregated(connector) as proxy:
        for pod in prefills(proxy):
            await pod.kill()
        for number in range(3):
            assert (await ask(proxy, stream=True, request_id=f"r{number}")).is_whole
        if connector != "shared-storage":  # where they find their own
            assert transfers(proxy) == 0
        await settled(proxy)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "prefill", "prefill", "decode")], ids=len)
@pytest.mark.parametrize("fault", [Fault(FaultKind.REJECT, status=500), Fault(FaultKind.RESET)], ids=named)
@pytest.mark.parametrize("connector", MEETS_WHOLE)
async def test_if_every_prefill_fails_the_decode_pod_does_all(
    connector: ConnectorName, fault: Fault, roles: tuple[Role, ...]
) -> None:
    """After two of them: it is no fault of that pod's, though it may have waited for them."""
    async with disaggregated(connector, roles, BRIEFLY_KEPT, BRIEF) as proxy:
        for pod in prefills(proxy):
            pod.faults.set([fault])
        received = await ask(proxy, stream=True)
        assert (received.status, received.is_whole, received.text) == (200, True, await whole_text())
        assert received.headers["x-kvlane-endpoint"] == f"pod-{len(roles) - 1}"
        assert "x-kvlane-prefill-endpoint" not in received.headers
        assert sum(sum(pod.faults.met) for pod in prefills(proxy)) == min(2, len(roles) - 1)
        assert await proxy.sample('kvlane_disagg_requests_total{result="prefill-failed"}') == 1
        await settled(proxy, may_expire=True)


@pytest.mark.parametrize("connector", MEETS_WHOLE)
async def test_without_decode_pods_the_prefill_pods_do_all(connector: ConnectorName) -> None:
    async with disaggregated(connector) as proxy:
        for pod in decodes(proxy):
            await pod.kill()
        for number in range(3):
            assert (await ask(proxy, stream=True, request_id=f"r{number}")).is_whole
        await settled(proxy, may_expire=True)


async def test_a_request_that_cannot_be_split_is_refused_if_no_pod_can_do_all() -> None:
    async with disaggregated("sglang") as proxy:
        received = await ask(proxy, stream=False, n=2)
        assert received.status == 400
        assert "several-choices" in received.error
        assert not any(len(pod.requests) for pod in proxy.pods)


async def test_a_request_of_very_many_values_is_not_split() -> None:
    async with disaggregated() as proxy:
        received = await ask(proxy, stream=False, metadata=[[]] * (MOST_VALUES + 1))
        assert (received.status, received.text) == (200, await whole_text())
        assert not any(len(pod.requests) for pod in prefills(proxy))
        assert await proxy.sample('kvlane_disagg_requests_total{result="many-values"}') == 1


@pytest.mark.parametrize(
    ("connector", "dying"),
    [(connector, dying) for connector in CONNECTORS for dying in range(4 if connector in MEETS_WHOLE else 2)],
)
async def test_a_pod_that_dies_under_load_and_returns_fails_no_request(connector: ConnectorName, dying: int) -> None:
    """Streams that had begun on it go on elsewhere, as requests of one pod: so not where no pod takes these."""
    slower = replace(SIM, time_scale=5, transfer=TransferTiming(failure=1.0, expiry=10.0))
    async with disaggregated(connector, sim=slower, continued=["*"]) as proxy:
        tasks = [asyncio.create_task(ask(proxy, stream=True, max_tokens=60, request_id=f"r{n}")) for n in range(24)]
        pod = proxy.pods[dying]
        await until(lambda: len(pod.requests.open) > 2)
        await pod.kill()
        await asyncio.sleep(0.1)
        await pod.start(port=pod.port)
        received = [await task for task in tasks]
        assert [one.error for one in received if not one.is_whole] == []
        assert {one.text for one in received} == {await whole_text(max_tokens=60)}
        await settled(proxy, may_expire=True)


async def test_failures_of_a_prefill_pod_count_for_it_alone() -> None:
    async with disaggregated() as proxy:
        for pod in prefills(proxy):
            pod.faults.set([Fault(FaultKind.REJECT, status=503)])
        for number in range(3):
            assert (await ask(proxy, stream=True, request_id=f"r{number}")).is_whole
        for index in range(4):
            sample = await proxy.sample(f'kvlane_attempts_total{{ending="upstream-failed",endpoint="pod-{index}"}}')
            assert bool(sample) is (index < 2)


async def test_a_request_at_its_deadline_ends_with_its_prefill() -> None:
    async with disaggregated(patience="60s") as proxy:
        for pod in prefills(proxy):
            pod.faults.set([Fault(FaultKind.HANG)])
        body = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}]}
        headers = {"x-request-timeout-ms": "200"}
        task = proxy.http.post(proxy.url + CHAT, json=body, headers=headers)
        async with asyncio.timeout(5), task as response:
            assert response.status == 504
        assert not any(len(pod.requests) for pod in decodes(proxy))
        await settled(proxy)


async def test_an_expired_transfer_is_computed_again() -> None:
    """The transfer ids are old before the decode pod comes to its request."""
    brief = replace(SIM, max_num_seqs=1, transfer=TransferTiming(failure=1.0, expiry=4.0))
    async with disaggregated(sim=brief) as proxy:
        first = [asyncio.create_task(ask(proxy, stream=True, max_tokens=2000, request_id=f"l{n}")) for n in range(2)]
        await until(lambda: all(pod.engine.running for pod in decodes(proxy)))
        reliable = asyncio.create_task(ask(proxy, stream=False, request_id="late"))
        received = [await task for task in (*first, reliable)]
        assert [one.error for one in received] == ["", "", ""]
        assert all(one.is_whole for one in received)
        assert sum(pod.engine.stats.expired_transfers for pod in prefills(proxy)) >= 1
        await settled(proxy, may_expire=True)
