"""Two prefill and two decode pods; one never gives a complete response: whichever it is, however it ends, wherever
in the response, no client sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, SimFleet, TransferTiming
from proxy.lab.sim.config import ConnectorName
from tests.helpers.scenarios.cutting import INSIDE_THE_HEAD, NOTHING, Cut, End, Way, way_to
from tests.helpers.scenarios.disagg import CONNECTORS, PROMPT, ROLES, SIM, ask, sections, settled, whole_text
from tests.helpers.scenarios.stack import Stack, running
from tests.helpers.waiting import until

KEPT_FOR_A_MOMENT = replace(SIM, transfer=TransferTiming(failure=1.0, expiry=10.0))
"""Half a second: blocks of a disconnected prefill pod are never pulled."""

SLOW_TRANSFER = replace(SIM, time_scale=5.0, transfer=TransferTiming(base=2.0, failure=1.0, expiry=60.0))
"""Of 0.4 s. 400 tokens take longer than it does to begin the next one."""

POINTS = {
    "before the head": Cut(End.FIN, NOTHING),
    "in the head": Cut(End.FIN, INSIDE_THE_HEAD),
    "after the head": Cut(End.FIN, body=0),
    "in the body": Cut(End.FIN, body=60),
}
"""Before any byte of the response has reached the client."""

ROLE = {0: "a prefill pod", 1: "the other prefill pod", 2: "a decode pod", 3: "the other decode pod"}
PATIENCE = "1s"
"""For what hangs."""


@asynccontextmanager
async def fleet(
    failing: int, cut: Cut, connector: ConnectorName = "nixl", config: SimConfig = KEPT_FOR_A_MOMENT
) -> AsyncIterator[tuple[Stack, Way]]:
    configs = [replace(config, role=role, connector=connector) for role in ROLES]
    async with SimFleet(len(ROLES), configs) as sim, way_to(sim.urls[failing], cut) as way:
        urls = [way.url if number == failing else url for number, url in enumerate(sim.urls)]
        given = sections(connector, PATIENCE if cut.end is End.HANG else "20s", continued=["*"])
        if cut.end is End.HANG:  # what ends a complete response, whose first byte may come with the last
            given["reliability"]["health"] = {"stall": PATIENCE}
        each = [{"role": role} for role in ROLES]
        async with running(urls, given, each) as app, aiohttp.ClientSession() as http:
            yield Stack(app, sim, http), way


CASES = [
    (role, point, stream)
    for role, point, stream in product(ROLE, POINTS, ["stream", "one piece"])
    if stream == "stream" or role < 2 or POINTS[point].body is None
]
"""The client of a complete response has its head when the body begins."""


@pytest.mark.parametrize("end", End, ids=lambda end: end.value)
@pytest.mark.parametrize(
    ("failing", "point", "how"), CASES, ids=[f"{ROLE[role]}, {point}, {how}" for role, point, how in CASES]
)
async def test_a_pod_that_ends_its_responses_too_early_does_not_affect_clients(
    failing: int, point: str, how: str, end: End
) -> None:
    cut = replace(POINTS[point], end=end)
    async with fleet(failing, cut) as (proxy, _):
        expected = await whole_text()
        for number in range(3):
            received = await ask(proxy, stream=how == "stream", request_id=f"r{number}")
            assert (received.status, received.is_whole, received.error, received.text) == (200, True, "", expected)
        assert cut.met
        await settled(proxy, may_expire=True)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("failing", ROLE, ids=ROLE.__getitem__)
async def test_no_connector_lets_an_early_end_affect_clients(failing: int, connector: ConnectorName) -> None:
    cut = Cut(End.RESET, INSIDE_THE_HEAD)
    async with fleet(failing, cut, connector) as (proxy, _):
        expected = await whole_text()
        for number in range(3):
            received = await ask(proxy, stream=True, request_id=f"r{number}")
            assert (received.status, received.is_whole, received.error, received.text) == (200, True, "", expected)
        assert cut.met
        await settled(proxy, may_expire=True)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_late_cancellation_takes_nothing_from_the_next_decode_pod(
    connector: ConnectorName,
) -> None:
    """It lets go of its own transfer while the other pod fetches: one of another name, or both fail."""
    cut = Cut(End.RESET, INSIDE_THE_HEAD, release=asyncio.Event())
    async with fleet(2, cut, connector, SLOW_TRANSFER) as (proxy, _), asyncio.TaskGroup() as group:
        group.create_task(_tell(proxy, cut))
        for number in itertools.count():
            messages = [{"role": "user", "content": f"{number}: {PROMPT}"}]  # unknown to every pod
            received = await ask(proxy, stream=True, max_tokens=400, messages=messages)
            assert (received.status, received.is_whole, received.error) == (200, True, "")
            if cut.met:
                break
        assert [pod.engine.stats.failed_transfers for pod in proxy.pods] == [0, 0, 0, 0]
        await settled(proxy, may_expire=True)


async def _tell(proxy: Stack, cut: Cut) -> None:
    """The disconnected pod, while it still responds, and the next one pulls."""
    next_one = proxy.pods[3]
    fetched = 0
    while not cut.met:
        fetched = next_one.engine.stats.transfers
        await asyncio.sleep(0.001)
    await until(lambda: bool(next_one.engine.loading) or next_one.engine.stats.transfers > fetched)
    assert cut.release is not None
    cut.release.set()


@pytest.mark.parametrize("end", End, ids=lambda end: end.value)
async def test_another_pod_continues_a_stream_that_ends_early(end: End) -> None:
    cut = Cut(end, body=1500)
    async with fleet(2, cut) as (proxy, _):
        expected = await whole_text(max_tokens=40)
        for number in range(3):
            received = await ask(proxy, stream=True, request_id=f"r{number}", max_tokens=40)
            assert (received.status, received.is_whole, received.error, received.text) == (200, True, "", expected)
        assert cut.met
        await settled(proxy, may_expire=True)
