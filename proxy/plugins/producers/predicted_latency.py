"""Predict how soon each pod would answer, from what was seen of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange
from proxy.core.params import param
from proxy.core.plugin import DataProducer, EndpointRemoved, PostResponse, PreRequest, plugin
from proxy.core.ports import Clock, InstanceName
from proxy.core.request import InferenceRequest
from proxy.latency.keys import LATENCY, LatencyForecast
from proxy.latency.pod import FleetModel, Leg, PodModel
from proxy.prefix.keys import PREFIX_MATCH, PrefixMatch

PRICE = float(os.environ.get("PRICE", "0"))
TPOTW = float(os.environ.get("TPOTW", "0"))
KVW = float(os.environ.get("KVW", "0"))
KVROOM = float(os.environ.get("KVROOM", "1"))
HURT = float(os.environ.get("HURT", "0"))


@plugin("predicted-latency-producer")
@dataclass(slots=True)
class PredictedLatencyProducer(DataProducer, PreRequest, PostResponse, EndpointRemoved):
    waits: ClassVar[bool] = False

    name: InstanceName
    clock: Clock
    prefix_match_info_producer_name: str = param("", "Whose matches to read; empty: those of the only producer.")
    fleet: FleetModel = field(init=False, default_factory=FleetModel)
    _pods: dict[Endpoint, PodModel] = field(init=False, default_factory=dict)
    _legs: dict[Exchange, Leg] = field(init=False, default_factory=dict)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (LATENCY.of(self.name),)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (PREFIX_MATCH.of(self.prefix_match_info_producer_name),)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        now = self.clock.now()
        for endpoint in endpoints:
            model = self._pods.get(endpoint)
            if model is None:
                model = self._pods[endpoint] = PodModel(self.fleet, now)
            model.catch_up(now)
        match = request.state.read(PREFIX_MATCH.of(self.prefix_match_info_producer_name))
        request.state.write(self.provides[0], Forecast(self, request.prompt.tokens, match))

    def pre_request(self, exchange: Exchange, endpoint: Endpoint) -> None:
        model = self._pods.get(endpoint)
        if model is None:
            return
        prompt = exchange.request.prompt.tokens
        prefill = exchange.charge[0] if exchange.charge else prompt
        self._legs[exchange] = model.dispatch(exchange, prefill, prompt, self.clock.now())

    def post_response(self, exchange: Exchange, endpoint: Endpoint) -> None:
        leg = self._legs.pop(exchange, None)
        model = self._pods.get(endpoint)
        if leg is None or model is None:
            return
        now = self.clock.now()
        model.catch_up(now)
        model.end(leg, now)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._pods.pop(endpoint, None)


class Forecast(LatencyForecast):
    __slots__ = ("_match", "_producer", "_prompt")

    def __init__(self, producer: PredictedLatencyProducer, prompt: int, match: PrefixMatch | None) -> None:
        self._producer = producer
        self._prompt = prompt
        self._match = match

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        prompt, match, producer = self._prompt, self._match, self._producer
        missing = match.missing(endpoints, prompt) if match is not None else [prompt] * len(endpoints)
        models = list(map(producer._pods.__getitem__, endpoints))
        now = producer.clock.now()
        output = producer.fleet.output
        costs = []
        for m, uncached, endpoint in zip(models, missing, endpoints, strict=True):
            d = m.due - now
            wait = m.rest + (d if d > 0.0 else d * m.patience)
            n = m.decoding
            step = m.step + m.per_running * n
            if n and not m.legs:
                wait = 0.5 * step
            own = m.fixed * step + uncached * (m.per_token + m.per_pair * (prompt - 0.5 * uncached))
            costs.append(wait + own * (1.0 + PRICE) + TPOTW * (n * own + output * (step + m.per_running * n)))
        return costs
