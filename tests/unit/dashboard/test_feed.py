from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from proxy.core.errors import Saturated
from proxy.core.ports import ManualClock
from proxy.dashboard.feed import MOST_BEHIND, MOST_VIEWERS, Feed, Panel, PodRows
from proxy.dashboard.samples import Samples
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from tests.helpers.waiting import PATIENCE

Events = AsyncGenerator[bytes, None]


class Shown:
    """A feed over one panel with a value that a test sets, and pods that it adds."""

    def __init__(self) -> None:
        self.fleet, self.value, self.reads = Fleet(ManualClock()), 1, 0
        self.fails = False
        rows = PodRows(self.fleet, ManualClock(), lambda pod: "closed", lambda pod: {}, lambda: lambda endpoint: None)
        panels = [Panel("panel", self.read), Panel("broken", self.fail)]
        self.feed = Feed(rows, Samples(), self.sample, panels, ManualClock(), interval=0.001)

    def add(self, name: str) -> None:
        self.fleet.add(PodSettings(url=f"http://{name}", name=name))

    async def read(self) -> int:
        self.reads += 1
        return self.value

    async def fail(self) -> Any:
        raise ZeroDivisionError

    async def sample(self) -> None:
        if self.fails:
            raise ZeroDivisionError


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    shown = Shown()
    async with shown.feed:
        yield shown


async def next_of(events: Events) -> tuple[str, dict[str, Any]]:
    event = await asyncio.wait_for(anext(events), PATIENCE)
    head, data, *_ = event.decode().split("\n")
    return head.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))


async def change_with(events: Events, part: str) -> dict[str, Any]:
    """The next change in which this part is."""
    while True:
        name, data = await next_of(events)
        assert name == "change"
        if part in data:
            return data


async def test_the_first_event_has_everything_and_later_ones_the_changes(shown: Shown) -> None:
    shown.add("a")
    async with aclosing(shown.feed.events()) as events:
        name, data = await next_of(events)
        assert name == "all"
        assert set(data["pods"]) == {"a"}
        assert data["panel"] == 1
        _, data = await next_of(events)
        assert set(data) == {"at"}
        shown.add("b")
        assert set((await change_with(events, "pods"))["pods"]) == {"b"}
        shown.value = 2
        assert (await change_with(events, "panel"))["panel"] == 2


async def test_nothing_is_built_without_viewers(shown: Shown) -> None:
    async with aclosing(shown.feed.events()) as events:
        await next_of(events)
    async with asyncio.timeout(PATIENCE):
        while shown.feed.is_building:
            await asyncio.sleep(0)
    built = shown.feed.pictures
    await asyncio.sleep(0.02)
    assert shown.feed.pictures == built


async def test_a_viewer_that_returns_gets_the_current_state(shown: Shown) -> None:
    for value in (1, 2):
        shown.value = value
        async with aclosing(shown.feed.events()) as events:
            assert (await next_of(events))[1]["panel"] == value
        async with asyncio.timeout(PATIENCE):
            while shown.feed.is_building:
                await asyncio.sleep(0)


async def test_all_viewers_share_one_snapshot(shown: Shown) -> None:
    async with aclosing(shown.feed.events()) as one, aclosing(shown.feed.events()) as other:
        for _ in range(5):
            await asyncio.gather(next_of(one), next_of(other))
        assert shown.reads <= shown.feed.pictures + 1


async def test_a_viewer_that_lags_behind_receives_the_whole_snapshot_again(shown: Shown) -> None:
    async with aclosing(shown.feed.events()) as events:
        await next_of(events)
        built = shown.feed.pictures
        async with asyncio.timeout(PATIENCE):
            while shown.feed.pictures < built + MOST_BEHIND + 3:
                await asyncio.sleep(0.001)
        shown.value = 7
        name, data = await next_of(events)
        assert name == "all"
        assert "panel" in data


async def test_the_number_of_viewers_is_limited(shown: Shown) -> None:
    viewers = [shown.feed.events() for _ in range(MOST_VIEWERS)]
    for viewer in viewers:
        await next_of(viewer)
    with pytest.raises(Saturated):
        await anext(shown.feed.events())
    await viewers.pop().aclose()
    async with aclosing(shown.feed.events()) as events:
        assert (await next_of(events))[0] == "all"
    for viewer in viewers:
        await viewer.aclose()


async def test_a_panel_that_fails_is_empty_and_the_others_are_not(
    shown: Shown, caplog: pytest.LogCaptureFixture
) -> None:
    async with aclosing(shown.feed.events()) as events:
        _, data = await next_of(events)
    assert data["broken"] is None
    assert data["panel"] == 1
    assert "failed to read broken" in caplog.text


async def test_viewers_survive_a_failed_snapshot(shown: Shown, caplog: pytest.LogCaptureFixture) -> None:
    shown.fails = True
    async with aclosing(shown.feed.events()) as events:
        first = asyncio.get_running_loop().create_task(next_of(events))
        async with asyncio.timeout(PATIENCE):
            while "failed to build a snapshot" not in caplog.text:
                await asyncio.sleep(0.001)
        shown.fails = False
        assert (await first)[0] == "all"


async def test_viewers_are_disconnected_when_the_port_closes() -> None:
    shown = Shown()
    async with shown.feed:
        events = shown.feed.events()
        await next_of(events)
    assert [event async for event in events] == []
