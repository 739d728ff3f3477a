from __future__ import annotations

from typing import Any

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.dashboard.heat import MOST_KNOWN, Heat
from proxy.prefix.index import PrefixIndex

SHARED = list(range(1, 21))
CAPACITY = 100_000


class Warm:
    """An index in which pods respond to prompts, and its heat map."""

    def __init__(self) -> None:
        self.clock = ManualClock(now=100.0)
        self.index = PrefixIndex(self.clock, max_siblings=16)
        self.heat = Heat(lambda: [self.index], self.clock)
        self._number = 1000

    def reply(self, pod: Endpoint, beginning: list[int]) -> None:
        """A prompt that begins so, and ends as no other does."""
        self._number += 10
        self.index.confirm(self.index.reserve([[*beginning, self._number, self._number + 1]], pod, CAPACITY))

    async def next_read(self) -> dict[str, Any]:
        self.clock.advance(2.5)
        shown = await self.heat.read()
        self.clock.advance(2.5)
        assert shown is not None
        return shown


async def test_common_prefixes_are_hotter_than_single_ones() -> None:
    warm, pod = Warm(), Endpoint("a")
    for _ in range(4):
        warm.reply(pod, SHARED)
        warm.reply(pod, SHARED)
        shown = await warm.next_read()
    hottest = max(shown["groups"], key=lambda group: sum(heat for _, heat in group["cells"]))
    assert (hottest["first"], hottest["blocks"]) == (0, len(SHARED))
    others = [heat for group in shown["groups"] if group is not hottest for _, heat in group["cells"]]
    assert all(heat < hottest["cells"][0][1] / 2 for heat in others)


async def test_prefixes_of_one_request_yield_to_prefixes_of_many() -> None:
    warm, pod = Warm(), Endpoint("a")
    for _ in range(3):
        warm.reply(pod, SHARED)
        shown = await warm.next_read()
    assert [group["first"] for group in shown["groups"]] == [0]


async def test_cells_belong_to_the_pods_that_responded() -> None:
    warm = Warm()
    pods = [Endpoint(f"pod-{number}") for number in (2, 10)]
    warm.reply(pods[1], SHARED)
    warm.reply(pods[0], list(range(500, 510)))
    shown = await warm.next_read()
    assert shown["pods"] == ["pod-2", "pod-10"]
    by_place = {group["cells"][0][0] for group in shown["groups"]}
    assert by_place == {0, 1}
    assert all(len(group["cells"]) == 1 for group in shown["groups"])


async def test_unused_prefixes_are_dropped() -> None:
    warm = Warm()
    warm.reply(Endpoint("a"), SHARED)
    assert (await warm.next_read())["groups"]
    warm.clock.advance(600.0)
    assert not (await warm.next_read())["groups"]


async def test_reading_does_not_change_the_index() -> None:
    warm, pod = Warm(), Endpoint("a")
    warm.reply(pod, SHARED)
    version, pairs = warm.index.version, warm.index.pairs
    await warm.next_read()
    assert (warm.index.version, warm.index.pairs) == (version, pairs)


async def test_memory_is_bounded_with_any_prompts() -> None:
    warm, pod = Warm(), Endpoint("a")
    for number in range(40):
        for other in range(100):
            warm.reply(pod, [number * 10_000 + other * 10 + 7])
        await warm.next_read()
    assert len(warm.heat._uses) <= MOST_KNOWN + 100 * 3


async def test_without_an_index_of_groups_nothing_is_shown() -> None:
    assert await Heat(list, ManualClock()).read() is None
