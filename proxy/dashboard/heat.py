"""The heat map: the most used beginnings of prompts and their pods, from repeated reads of the recently used blocks."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, NamedTuple

from proxy.core.ports import Clock
from proxy.prefix.forest import PodMemory, Segment
from proxy.prefix.index import PrefixIndex

STEPS = 10_000
"""Number of holdings that one read examines, for all pods together; 5 ms."""

LEAST_STEPS = 16
"""Smallest number of holdings that are examined per pod."""

PODS_AT_ONCE = 20

MEMORY = 60.0
"""Seconds in which the weight of a use falls to 1/e."""

MOST_KNOWN = 2000
FORGOTTEN = 0.05
SHOWN_GROUPS = 24
SHOWN_PODS = 40


class Group(NamedTuple):
    """Blocks of prompts that are used together; `first` and `blocks` are their position in the prompts."""

    key: int
    first: int
    blocks: int


Row = tuple[float, Group, dict[str, float]]
"""The heat of a group, on all pods together and on each."""


@dataclass(slots=True)
class Heat:
    """The heat of groups. A use warms a group; a group of only one request is used once and cools soon."""

    indexes: Callable[[], Sequence[PrefixIndex]]
    clock: Clock
    _uses: dict[Group, dict[str, float]] = field(init=False, default_factory=dict)
    """Uses by pod."""
    _looked_at: float = field(init=False, default=0.0)

    async def read(self) -> dict[str, Any] | None:
        """Return the heat map in JSON; None if no index has groups. Let the event loop run in between."""
        indexes, now = self.indexes(), self.clock.now()
        if not indexes:
            return None
        since, self._looked_at = self._looked_at, now
        self._cool(now - since)
        for index in indexes:
            await self._read(index, max(since, now - MEMORY))
        return self._shown(indexes)

    async def _read(self, index: PrefixIndex, since: float) -> None:
        pods = list(index.memories)
        steps = max(LEAST_STEPS, STEPS // max(1, len(pods)))
        for position, pod in enumerate(pods):
            if position % PODS_AT_ONCE == PODS_AT_ONCE - 1:
                await asyncio.sleep(0)
            for segment in _used(pod, since, steps):
                group = Group(segment.hashes[0], index.depth_of(segment.start), segment.blocks)
                uses = self._uses.setdefault(group, {})
                uses[pod.endpoint.name] = uses.get(pod.endpoint.name, 0.0) + 1.0

    def _cool(self, seconds: float) -> None:
        factor = exp(-seconds / MEMORY)
        for uses in self._uses.values():
            for name in uses:
                uses[name] *= factor
        if len(self._uses) > MOST_KNOWN:
            self._uses = {group: uses for _, group, uses in _hottest(self._rows(), MOST_KNOWN // 2)}

    def _rows(self) -> list[Row]:
        return [(sum(uses.values()), group, uses) for group, uses in self._uses.items()]

    def _shown(self, indexes: Sequence[PrefixIndex]) -> dict[str, Any]:
        """Return the rows. Columns are the hottest pods; a cell is the position of its column, and the heat."""
        rows = _hottest(_in_common(self._rows()), SHOWN_GROUPS)
        warmth: defaultdict[str, float] = defaultdict(float)
        for _, _, uses in rows:
            for name, heat in uses.items():
                warmth[name] += heat
        names = sorted(heapq.nlargest(SHOWN_PODS, warmth, key=warmth.__getitem__), key=_natural)
        places = {name: place for place, name in enumerate(names)}
        return {
            "pods": names,
            "more": len(warmth) - len(names),
            "blocks": sum(index.pairs for index in indexes),
            "bytes": sum(index.bytes for index in indexes),
            "groups": [
                {
                    "key": f"{group.key:016x}"[:8],
                    "first": group.first,
                    "blocks": group.blocks,
                    "cells": [[places[name], round(heat, 2)] for name, heat in uses.items() if name in places],
                }
                for _, group, uses in sorted(rows, key=lambda row: min(map(_natural, row[2])))
            ],
        }


def _hottest(rows: Sequence[Row], number: int) -> list[Row]:
    return heapq.nlargest(number, rows, key=lambda row: (row[0], row[1].blocks))


def _in_common(rows: Sequence[Row]) -> list[Row]:
    """Return the groups without the ends of prompts that only one request has: two reads find the uses of one request
    in between. If there are no other groups, as at the first read, return all with some heat left."""
    more = [row for row in rows if row[0] > (2.0 if row[1].first else 1.0)]
    return more or [row for row in rows if row[0] > FORGOTTEN]


def _used(pod: PodMemory, since: float, steps: int) -> Iterator[Segment]:
    """Yield the segments that a request used after this time, the latest first."""
    holding = pod.ring.older
    for _ in range(steps):
        if holding is None or holding is pod.ring or holding.used_at is None or holding.used_at <= since:
            return
        yield holding.segment
        holding = holding.older


def _natural(name: str) -> tuple[str, int, str]:
    """Return the sort key that puts pod-10 after pod-9."""
    head = name.rstrip("0123456789")
    tail = name[len(head) :]
    return head, int(tail or 0), name
