"""What the supervisor learns from its workers for the autoscaler."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf
from typing import Any, cast

import orjson

from proxy.autoscale.signals import Signals
from proxy.cluster.questions import QuestionFailed
from proxy.cluster.reads import SIGNALS, WorkerSignals
from proxy.cluster.transport import Broker
from proxy.cluster.workers import Child, Workers
from proxy.core.ports import ManualClock
from proxy.settings import from_mapping
from proxy.telemetry.metrics import Catalogue

ROLE = ("default", "prefill")


def signals(slow: int, fast: int) -> Signals:
    found = Signals()
    found.queued, found.backlogs = {"default": 3}, {ROLE: 0.5}
    found.ttfts = {ROLE: [(0.1, float(fast)), (inf, float(fast + slow))]}
    found.cached_blocks = {"pod-0": 10 * slow}
    return found


class Replying(Workers):
    """Workers that reply what `replies_of` has."""

    def __init__(self, replies: Mapping[int, Any]) -> None:
        super().__init__(cast(Broker, None), ManualClock(), Catalogue("test"))
        self.replies_of = dict(replies)
        for number in replies:
            child = self.children[number] = Child(number, number, cast(asyncio.subprocess.Process, None), 0.0)
            child.ready.set()

    async def ask(self, worker: Child, topic: str, *arguments: Any, timeout: float) -> Any:
        assert topic == SIGNALS
        if worker.number not in self.replies_of:
            raise QuestionFailed("it has ended")
        return self.replies_of[worker.number]


def as_json(signals: Signals) -> Any:
    return orjson.loads(orjson.dumps(signals.as_json()))


def test_workers_are_added_up_and_what_they_say_survives_its_way() -> None:
    found = Signals.sum(Signals.read(as_json(each)) for each in (signals(1, 2), signals(0, 4), Signals()))
    assert found.queued == {"default": 6}
    assert found.backlogs == {ROLE: 1.0}
    assert found.ttfts == {ROLE: [(0.1, 6.0), (inf, 7.0)]}


def test_blocks_that_several_workers_know_are_counted_once() -> None:
    found = Signals.sum(Signals.read(as_json(signals(slow, 0))) for slow in (3, 4, 0))
    assert found.cached_blocks == {"pod-0": 40}


async def test_a_percentile_is_of_what_came_since_the_last_looks() -> None:
    settings = from_mapping({"autoscale": {"pools": {"default": {"roles": [{"name": "prefill", "min": 1, "max": 1}]}}}})
    workers = Replying({1: as_json(signals(100, 0))})
    pooled = WorkerSignals(Catalogue("test"), workers)
    pooled.pools = settings.autoscale.pools
    await pooled.update()
    assert pooled.known("default", "prefill", 0.0).ttft is None
    workers.replies_of[1] = as_json(signals(100, 10))
    await pooled.update()
    assert pooled.known("default", "prefill", 15.0).ttft == 0.1 * 0.9
    workers.replies_of[1] = as_json(signals(0, 1))
    await pooled.update()
    known = pooled.known("default", "prefill", 30.0)
    assert (known.ttft, known.queued, known.backlog) == (None, 3, 0.5)


async def test_a_silent_worker_counts_with_its_last_reply_until_it_ends() -> None:
    workers = Replying({1: as_json(signals(1, 0)), 2: as_json(signals(1, 0))})
    pooled = WorkerSignals(Catalogue("test"), workers)
    await pooled.update()
    del workers.replies_of[2]
    await pooled.update()
    assert pooled.signals.queued == {"default": 6}
    del workers.children[2]
    await pooled.update()
    assert pooled.signals.queued == {"default": 3}
