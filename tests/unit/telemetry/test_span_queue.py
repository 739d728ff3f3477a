from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from proxy.telemetry import traces
from proxy.telemetry.metrics import Counter
from proxy.telemetry.traces import SpanQueue
from tests.helpers.waiting import until


class Taken(SpanExporter):
    """What a collector took; while `gate` is closed nothing goes through."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.queried = threading.Event()
        self.results: list[SpanExportResult | Exception] = []
        """Results of the next exports."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.queried.set()
        if not self.gate.wait(20):
            return SpanExportResult.FAILURE
        self.names.extend(span.name for span in spans)
        result = self.results.pop(0) if self.results else SpanExportResult.SUCCESS
        if isinstance(result, Exception):
            raise result
        return result


@asynccontextmanager
async def sending(taken: Taken, lost: Counter, most: int = traces.MOST) -> AsyncIterator[Tracer]:
    provider, queue = TracerProvider(shutdown_on_exit=False), SpanQueue(taken, lost, most)
    provider.add_span_processor(queue)
    yield provider.get_tracer("test")
    await queue.stop()


def end(tracer: Tracer, *names: object) -> None:
    for name in names:
        tracer.start_span(str(name)).end()


async def test_ended_spans_are_sent_in_order() -> None:
    taken, lost = Taken(), Counter()
    async with sending(taken, lost) as tracer:
        end(tracer, *range(2000))
    assert taken.names == [str(number) for number in range(2000)]
    assert lost.value == 0


async def test_spans_beyond_the_limit_are_dropped_and_counted_without_waiting() -> None:
    taken, lost = Taken(), Counter()
    taken.gate.clear()
    async with sending(taken, lost, most=600) as tracer:
        end(tracer, *range(600))
        await asyncio.to_thread(taken.queried.wait, 10)
        end(tracer, *range(600, 2000))
        assert lost.value == 1400
        taken.gate.set()
    assert taken.names == [str(number) for number in range(600)]


async def test_spans_that_the_collector_rejects_are_counted_and_the_first_failure_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken, lost = Taken(), Counter()
    taken.results = [SpanExportResult.FAILURE, OSError("no route"), SpanExportResult.SUCCESS]
    async with sending(taken, lost) as tracer:
        for number in range(3):
            end(tracer, number)
            taken.queried.clear()
            await asyncio.to_thread(taken.queried.wait, 10)
    assert lost.value == 2
    assert caplog.text.count("the collector rejected spans") == 1
    assert "no route" in caplog.text


async def test_a_hanging_collector_does_not_block_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LAST_SECONDS", 0.1)
    taken, lost = Taken(), Counter()
    taken.gate.clear()
    async with sending(taken, lost) as tracer:
        end(tracer, *range(700))
    assert lost.value == 700
    taken.gate.set()
    await until(lambda: not any(thread.name == "OtelBatchSpanRecordProcessor" for thread in threading.enumerate()))
    assert lost.value == 700
