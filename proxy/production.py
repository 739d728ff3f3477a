"""Runs the data producers of a request: at once those that never wait, the others under one deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import takewhile

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import DataProducer
from proxy.core.record import DecisionRecord
from proxy.core.request import InferenceRequest

log = logging.getLogger(__name__)

PRODUCE_DEADLINE = 0.4
"""Seconds that all data producers of a request have together, beside those that one means to take."""

Raised = Callable[[DataProducer, str, Exception], None]
"""Called with a producer that raised, what failed, and the error."""

NameOf = Callable[[DataProducer], str]
"""The name of a producer in the configuration."""


def _derives(producer: DataProducer) -> bool:
    """Return whether it is no coroutine: it has a `derive` of its own, and no `produce`."""
    cls = type(producer)
    return cls.derive is not DataProducer.derive and cls.produce is DataProducer.produce


class Production:
    """The data producers of a pool, in an order in which nothing that may wait stands before what does not, unless it
    is needed."""

    def __init__(self, producers: Sequence[DataProducer], raised: Raised, name: NameOf) -> None:
        self._raised = raised
        self._name = name
        waits_from = next((at for at, producer in enumerate(producers) if producer.waits), len(producers))
        prompt, self._waiting = tuple(producers[:waits_from]), tuple(producers[waits_from:])
        self._deriving = tuple(takewhile(_derives, prompt))
        self._prompt = prompt[len(self._deriving) :]
        self.has_coroutines = bool(self._prompt or self._waiting)
        """Whether `derive` is not all of it."""
        self.waits = bool(self._waiting)
        """Whether the world may change in a `run`."""
        self._deadline = PRODUCE_DEADLINE + sum(producer.takes for producer in producers)

    async def run(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None = None
    ) -> None:
        """Run all producers. Never fails: scorers do without a datum that is missing afterwards."""
        self.derive(request, endpoints, record)
        if self.has_coroutines:
            await self.produce(request, endpoints, record)

    def derive(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None = None
    ) -> None:
        """Run the producers that are no coroutines."""
        endpoints = tuple(endpoints)
        for producer in self._deriving:
            try:
                if record is None:
                    producer.derive(request, endpoints)
                else:
                    name = self._name(producer)
                    record.call("DataProducer", producer, name, producer.derive, request, endpoints)
            except Exception as error:  # noqa: BLE001  # the request goes on without the datum
                self._failed(producer, request, error)

    async def produce(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None = None
    ) -> None:
        """Run the producers that are coroutines, after the others."""
        endpoints = tuple(endpoints)
        for producer in self._prompt:
            try:
                if record is None:
                    await producer.produce(request, endpoints)
                else:
                    await self._recorded(producer, request, endpoints, record)
            except Exception as error:  # noqa: BLE001  # the request goes on without the datum
                self._failed(producer, request, error)
        if not self._waiting:
            return
        try:
            async with asyncio.timeout(self._deadline):
                for producer in self._waiting:
                    try:
                        if record is None:
                            await producer.produce(request, endpoints)
                        else:
                            await self._recorded(producer, request, endpoints, record)
                    except Exception as error:  # noqa: BLE001
                        self._failed(producer, request, error)
        except TimeoutError:
            log.warning("request %s: the data producers were not done after %g s", request.id, self._deadline)

    async def _recorded(
        self, producer: DataProducer, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord
    ) -> None:
        await record.wait("DataProducer", producer, self._name(producer), producer.produce(request, endpoints))

    def _failed(self, producer: DataProducer, request: InferenceRequest, error: Exception) -> None:
        self._raised(producer, f"failed to produce for request {request.id}, which goes on without", error)
