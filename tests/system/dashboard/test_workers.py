from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from proxy.core.endpoint import Endpoint
from proxy.dashboard.feed import SummedCounts
from proxy.dashboard.samples import Series
from proxy.lab.sim.faults import Fault, FaultKind
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.host import CHAT, Host, host, question
from tests.helpers.dashboard.browser import ESCAPE, Page, chromium, needs_chromium
from tests.helpers.dashboard.scene import events
from tests.helpers.waiting import until

NEVER_GIVEN_UP = {
    "drain": {"grace": "10s"},
    "retries": {"attempts": 2, "budgetPercent": 100},
    "breaker": {"failures": 1000},
}


@asynccontextmanager
async def shown(served: Host) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    url = f"http://127.0.0.1:{served.supervisor.admin_port}/dashboard/events"
    async with served.admin_http.get(url) as reply, asyncio.timeout(60):
        yield events(reply)


async def test_the_host_shows_all_workers() -> None:
    async with host(workers=2) as served, shown(served) as received:
        _, first = await anext(received)
        assert set(first["pods"]) == {"pod-0", "pod-1"}
        assert first["about"]["workers"] == 2
        assert first["queues"] is None
        for number in range(6):
            await served.chat(f"question {number}")
        responded = 0.0
        async for _, change in received:
            point = change.get("point") or {"good": 0, "seconds": 0}
            responded += point["good"] * point["seconds"]
            if round(responded) == 6:
                break


async def test_failures_on_a_pod_include_all_current_and_former_workers() -> None:
    async with host(workers=2, reliability=NEVER_GIVEN_UP) as served:
        served.sim.pods[0].faults.set([Fault(FaultKind.REJECT, status=500)])
        for number in range(20):
            await served.chat(f"question {number}")
        failed = served.sim.pods[0].faults.met[0]
        assert failed > 0
        assert await counted(served) == {"pod-0": (failed, failed), "pod-1": (20, 0)}
        first, *_ = served.supervisor.pids
        os.kill(first, signal.SIGTERM)
        await until(lambda: first not in served.supervisor.pids and served.supervisor.workers_serving == 2)
        assert await counted(served) == {"pod-0": (failed, failed), "pod-1": (20, 0)}


async def counted(served: Host) -> dict[str, tuple[int, int]]:
    """Return the attempts of each pod and the failed ones, from the first snapshot of a viewer."""
    async with shown(served) as received:
        _, first = await anext(received)
    sent, failed = (first["fields"].index(name) for name in ("sent", "failed"))
    return {name: (row[sent], row[failed]) for name, row in first["pods"].items()}


def test_sums_are_of_the_series_that_were_read_last() -> None:
    read: list[Series] = []
    counts = SummedCounts(lambda: read[-1] if read else None)
    pod, other = Endpoint("a", "http://a:8000"), Endpoint("b", "http://b:8000")
    assert counts.of(pod) == {}
    catalogue, later = Catalogue("test"), Catalogue("test")
    catalogue.attempts.cell("a", "complete").add(7)
    catalogue.attempts.cell("a", "timed-out").add(1)
    read.append(Series(catalogue.families))
    assert counts.of(pod) == {"complete": 7, "timed-out": 1}
    assert counts.of(other) == {}
    later.attempts.cell("a", "complete").add(9)
    read.append(Series(later.families))
    assert counts.of(pod) == {"complete": 9}


BUTTONS = "document.querySelectorAll('#decision-list tbody button')"


@needs_chromium
async def test_decisions_of_all_workers_are_listed_and_shown_in_full() -> None:
    telemetry = {"accessLog": False, "logLevel": "error", "decisions": {}}
    with chromium() as driver:
        async with host(workers=2, telemetry=telemetry) as served:
            page, queried = Page(driver), [f"of-{number}" for number in range(12)]
            await page.open(f"http://127.0.0.1:{served.supervisor.admin_port}/dashboard")
            for name in queried:
                await ask(served, name)
            await page.ask("document.querySelector('#decisions').scrollIntoView()")
            await page.until(f"document.querySelectorAll('#decision-list tbody tr').length === {len(queried)}")
            seen = {await decided(page, number) for number in range(len(queried))}
            assert seen == set(queried)
            await page.ask(f"[{BUTTONS}[0].click(), document.querySelector('#dialog').close(), {BUTTONS}[1].click()]")
            await page.says("#dialog tr.chosen", "chosen")
            await page.press(ESCAPE)
            await page.says("#queue-list", "With several workers")
            assert await page.complaints() == []


async def decided(page: Page, row: int) -> str:
    """The request of that row, as its table says."""
    await page.ask(f"{BUTTONS}[{row}].click()")
    await page.says("#dialog tr.chosen", "chosen")
    request = await page.text("#dialog code")
    await page.press(ESCAPE)
    await page.until("!document.querySelector('#dialog').open")
    return request


async def ask(served: Host, name: str) -> None:
    """Over a connection of its own, so that any worker may get it."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(served.url + CHAT, json=question("Hello!"), headers={"x-request-id": name}) as response,
    ):
        assert response.status == 200
        await response.read()
