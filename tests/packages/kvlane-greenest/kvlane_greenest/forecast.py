"""A scorer that needs an external service: a producer queries it once per request, a scorer reads the result.

The producer is awaited under the gateway's deadline. If the service hangs, the datum is missing and all score 0.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, Scorer, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import DataKey, InferenceRequest

FORECAST: DataKey[Mapping[str, float]] = DataKey("GreenForecast")
"""Pod name -> share of renewable energy in the next minutes."""


@plugin("green-forecast-producer")
@dataclass(frozen=True, slots=True)
class GreenForecastProducer(DataProducer):
    """Query a forecast service about all pods at once: a line of JSON with their names, and a line of JSON back."""

    name: InstanceName
    host: str = param("127.0.0.1", "where the service listens")
    port: int = param(7070, "its port", at_least=1, at_most=65535)

    @property
    def provides(self) -> tuple[DataKey[Mapping[str, float]], ...]:
        return (FORECAST.of(self.name),)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(json.dumps([endpoint.name for endpoint in endpoints]).encode() + b"\n")
            request.state.write(self.provides[0], json.loads(await reader.readline()))
        finally:
            writer.close()


@plugin("green-forecast-scorer")
@dataclass(frozen=True, slots=True)
class GreenForecastScorer(Scorer):
    """The forecast share of renewable energy; 0 for all while there is no forecast."""

    forecast_producer_name: str = param("", "producer of the forecast, where there are several")

    @property
    def requires(self) -> tuple[DataKey[Mapping[str, float]], ...]:
        return (FORECAST.of(self.forecast_producer_name),)

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        forecast = request.state.read(self.requires[0]) or {}
        return [forecast.get(endpoint.name, 0.0) for endpoint in endpoints]
