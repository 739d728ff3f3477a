"""What the supervisor learns from its workers for the autoscaler."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import pytest

from proxy.autoscale.signals import Signals
from proxy.cluster.questions import SIGNALS, Questions, WorkerSignals, WorkerUnreachable
from proxy.cluster.workers import Child
from proxy.settings import from_mapping
from proxy.telemetry.metrics import Catalogue

ROLE = ("default", "prefill")


def signals(slow: int, fast: int) -> Signals:
    found = Signals()
    found.queued, found.backlogs = {"default": 3}, {ROLE: 0.5}
    found.ttfts = {ROLE: [(0.1, float(fast)), (inf, float(fast + slow))]}
    return found


class Workers(Questions):
    """Workers that send the replies of `replies_of`."""

    def __init__(self, replies: Mapping[int, bytes]) -> None:
        super().__init__(lambda address, message: None)
        self.replies_of = dict(replies)

    async def ask(self, address: int, topic: str, argument: Any = None, timeout: float | None = None) -> bytes:
        assert topic == SIGNALS
        if address not in self.replies_of:
            raise WorkerUnreachable("it has ended")
        return self.replies_of[address]


class Worker(Child):
    """One that always replies."""

    def __init__(self, number: int) -> None:
        self.number = self.seat = number

    @property
    def replies(self) -> bool:
        return True


def test_workers_are_added_up_and_what_they_say_survives_its_way() -> None:
    found = Signals.sum(Signals.read(each.packed()) for each in (signals(1, 2), signals(0, 4), Signals()))
    assert found.queued == {"default": 6}
    assert found.backlogs == {ROLE: 1.0}
    assert found.ttfts == {ROLE: [(0.1, 6.0), (inf, 7.0)]}


@pytest.mark.parametrize("body", [b"", b"[1]", b"[{},[],[[1,2]]]", b'[{"a":"b"},[],[]]', b"[[],[],[]]"])
def test_signals_of_another_shape_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="unreadable signals"):
        Signals.read(body)


async def test_a_percentile_is_of_what_came_since_the_last_looks() -> None:
    settings = from_mapping({"autoscale": {"pools": {"default": {"roles": [{"name": "prefill", "min": 1, "max": 1}]}}}})
    workers = Workers({1: signals(100, 0).packed()})
    pooled = WorkerSignals(Catalogue("test"), workers, lambda: [Worker(1)])
    pooled.pools = settings.autoscale.pools
    await pooled.update()
    assert pooled.known("default", "prefill", 0.0).ttft is None
    workers.replies_of[1] = signals(100, 10).packed()
    await pooled.update()
    assert pooled.known("default", "prefill", 15.0).ttft == 0.1 * 0.9
    workers.replies_of[1] = signals(0, 1).packed()
    await pooled.update()
    known = pooled.known("default", "prefill", 30.0)
    assert (known.ttft, known.queued, known.backlog) == (None, 3, 0.5)


async def test_a_silent_worker_counts_with_its_last_reply_until_it_ends() -> None:
    workers = Workers({1: signals(1, 0).packed(), 2: signals(1, 0).packed()})
    there: list[Child] = [Worker(1), Worker(2)]
    pooled = WorkerSignals(Catalogue("test"), workers, lambda: there)
    await pooled.update()
    del workers.replies_of[2]
    await pooled.update()
    assert pooled.signals.queued == {"default": 6}
    del there[1]
    await pooled.update()
    assert pooled.signals.queued == {"default": 3}
