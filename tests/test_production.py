"""How long the data producers of a request may take."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import DataProducer, plugin
from proxy.core.request import InferenceRequest
from proxy.production import PRODUCE_DEADLINE, Production

DONE: DataKey[bool] = DataKey("Done")


@plugin("slow-producer")
@dataclass(frozen=True, slots=True)
class Slow(DataProducer):
    """Takes longer than all producers have together."""

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        await asyncio.sleep(1.2 * PRODUCE_DEADLINE)
        request.state.write(DONE, True)


@plugin("patient-producer")
@dataclass(frozen=True, slots=True)
class Patient(Slow):
    takes: ClassVar[float] = 60.0


async def produced(producer: DataProducer) -> bool | None:
    request = InferenceRequest("id", "/", "model")
    await Production([producer], repeat([producer])).run(request, ())
    return request.state.read(DONE)


async def test_who_says_how_long_it_takes_has_the_time_for_it() -> None:
    assert await produced(Slow()) is None
    assert await produced(Patient()) is True
