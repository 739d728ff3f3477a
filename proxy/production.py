"""Runs the data producers of a request: at once those that never wait, the others under one deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import DataProducer
from proxy.core.request import InferenceRequest

log = logging.getLogger(__name__)

PRODUCE_DEADLINE = 0.4
"""Seconds that all data producers of a request have together, beside those that one means to take."""

Raised = Callable[[DataProducer, str, Exception], None]
"""Called with a producer that raised, what failed, and the error."""


class Production:
    """`producers` come in an order in which nothing that may wait stands before what does not, unless it is needed;
    `rounds` hands out, for every request, them or who stands in their places."""

    def __init__(
        self, producers: Sequence[DataProducer], rounds: Iterator[Sequence[DataProducer]], raised: Raised
    ) -> None:
        self._producers = producers
        self._raised = raised
        self._prompt = next((at for at, producer in enumerate(producers) if producer.waits), len(producers))
        self.waits = self._prompt < len(producers)
        """Whether the world may change in a `run`."""
        self._deadline = PRODUCE_DEADLINE + sum(producer.takes for producer in producers)
        self._rounds = rounds

    async def run(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        """Never fails: what is missing afterwards, scorers do without."""
        producers, endpoints = next(self._rounds), tuple(endpoints)
        for producer in producers[: self._prompt] if self.waits else producers:
            try:
                await producer.produce(request, endpoints)
            except Exception as error:  # noqa: BLE001  # the request goes on without the datum
                self._failed(producers.index(producer), request, error)
        if not self.waits:
            return
        try:
            async with asyncio.timeout(self._deadline):
                for producer in producers[self._prompt :]:
                    try:
                        await producer.produce(request, endpoints)
                    except Exception as error:  # noqa: BLE001
                        self._failed(producers.index(producer), request, error)
        except TimeoutError:
            log.warning("request %s: the data producers were not done after %g s", request.id, self._deadline)

    def _failed(self, at: int, request: InferenceRequest, error: Exception) -> None:
        self._raised(self._producers[at], f"failed to produce for request {request.id}, which goes on without", error)
