"""Ended spans on their way to the collector: bounded, and sent by a thread of their own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from proxy.core.tasks import Tasks
from proxy.telemetry.instruments import Counter

log = logging.getLogger(__name__)

INTERVAL = 1.0
BATCH = 512
MOST = 4096
"""That wait, at about 2 KiB each; what comes on top while the collector is slow is lost, and counted."""

LAST_SECONDS = 5.0
"""That a stopping process gives the collector to take what is left."""


class SpanQueue(SpanProcessor):
    """`async with`: inside of it spans are sent. Spans end on the event loop only."""

    def __init__(self, exporter: SpanExporter, lost: Counter, most: int = MOST) -> None:
        self._exporter = exporter
        self._lost = lost
        self._most = most
        self._spans: deque[ReadableSpan] = deque()
        self._many = asyncio.Event()
        self._sending = asyncio.Lock()
        self._is_broken = False

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._spans) >= self._most:
            self._lost.add(1)
            return
        self._spans.append(span)
        if len(self._spans) >= BATCH:
            self._many.set()

    async def __aenter__(self) -> SpanQueue:
        self._thread = ThreadPoolExecutor(1, "traces")
        self._tasks = Tasks()
        self._tasks.keep(self._run, "traces")
        return self

    async def __aexit__(self, *_: object) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self._send_all()
        await self._tasks.stop()
        self._lost.add(len(self._spans))
        self._spans.clear()
        await asyncio.to_thread(self._exporter.shutdown)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):  # not wait_for: before Python 3.12 it can swallow a cancellation
                async with asyncio.timeout(INTERVAL):
                    await self._many.wait()
            self._many.clear()
            await self._send_all()

    async def _send_all(self) -> None:
        """And waits for those that somebody else is sending."""
        async with self._sending:
            while self._spans:
                await self._send_batch([self._spans.popleft() for _ in range(min(BATCH, len(self._spans)))])

    async def _send_batch(self, batch: list[ReadableSpan]) -> None:
        went = False
        try:
            went = await asyncio.get_running_loop().run_in_executor(self._thread, self._send, batch)
        except Exception:
            log.exception("spans cannot be sent")
        finally:
            if not went:
                self._lost.add(len(batch))

    def _send(self, batch: list[ReadableSpan]) -> bool:
        """In the thread. The first failure in a row is logged."""
        went = self._exporter.export(batch) is SpanExportResult.SUCCESS
        if not went and not self._is_broken:
            log.warning("the collector takes no spans: they are lost, and counted, until it does again")
        self._is_broken = not went
        return went
