from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from proxy.telemetry import traces
from proxy.telemetry.metrics import Counter
from proxy.telemetry.traces import SpanQueue


class Taken(SpanExporter):
    """What a collector took; while `gate` is closed nothing goes through."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        if not self.gate.wait(20):
            return SpanExportResult.FAILURE
        self.names.extend(span.name for span in spans)
        return SpanExportResult.SUCCESS


def end(queue: SpanQueue, *names: object) -> None:
    for name in names:
        queue.on_end(ReadableSpan(name=str(name)))


async def test_all_that_ended_is_sent_in_its_order() -> None:
    taken, lost = Taken(), Counter()
    async with SpanQueue(taken, lost) as queue:
        end(queue, *range(2000))
    assert taken.names == [str(number) for number in range(2000)]
    assert lost.value == 0


async def test_what_finds_no_room_is_lost_and_counted_and_nobody_waits() -> None:
    taken, lost = Taken(), Counter()
    taken.gate.clear()
    async with SpanQueue(taken, lost, most=600) as queue:
        end(queue, *range(600))
        await asyncio.to_thread(taken.asked.wait, 10)
        end(queue, *range(600, 2000))
        assert lost.value > 0
        taken.gate.set()
    assert len(taken.names) + lost.value == 2000


async def test_a_collector_that_hangs_does_not_keep_a_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LAST_SECONDS", 0.1)
    taken, lost = Taken(), Counter()
    taken.gate.clear()
    async with SpanQueue(taken, lost) as queue:
        end(queue, *range(700))
    assert lost.value == 700
    taken.gate.set()
