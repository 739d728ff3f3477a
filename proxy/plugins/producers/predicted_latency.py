"""Predict how soon each pod would answer, from what this proxy has seen of it."""

from __future__ import annotations

import logging
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
from proxy.core.units import Duration
from proxy.latency.fleet import FleetModel
from proxy.latency.keys import LATENCY, LatencyForecast
from proxy.latency.pod import PodModel, Prices
from proxy.latency.work import Leg
from proxy.prefix.keys import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch

log = logging.getLogger(__name__)

TRUST_AGAIN = 0.8
"""Predictions are trusted again when the error is below this share of the limit."""

UNTRUSTED = "%s: predictions are off by %.0f %%, more than %.0f %%; until they are better, pods are scored without them"

UNUSED = "accepted and without effect: "


@plugin("predicted-latency-producer")
@dataclass(slots=True)
class PredictedLatencyProducer(DataProducer, PreRequest, PostResponse, EndpointRemoved):
    """Learns online, for each pod, what an engine step, an uncached prompt token and a running request cost, from the
    first and last bytes of streamed answers and the cached tokens they report; no training servers, no profiles.

    A pod that nothing is known of is taken to be like the others.
    """

    waits: ClassVar[bool] = False

    name: InstanceName
    clock: Clock
    work_cost: float = param(
        0.2,
        "what a second that a pod works on the prompt costs those who come later, in seconds of waiting",
        at_least=0,
    )
    decode_cost: float = param(
        0.03, "what a second of delay costs an answer that is under way, in seconds before its start", at_least=0
    )
    max_relative_error: float = param(
        1.0,
        "mean error of recent predictions, over the mean of what was seen, above which none is trusted",
        more_than=0,
    )
    prefix_match_info_producer_name: str = param("", "whose matches to read; empty: those of the only producer")
    slo_buffer_factor: float = param(1.0, UNUSED + "objectives are taken as they are")
    context_ttl: Duration = param(Duration(300.0), UNUSED + "what is known of a request ends with it", key="contextTTL")
    streaming_mode: bool = param(False, UNUSED + "what is streamed is told apart request by request")
    endpoint_role_label: str = param("", UNUSED + "each pod is learnt by itself")
    predict_in_produce: bool = param(True, UNUSED + "predictions are made when pods are scored")
    fleet: FleetModel = field(init=False, repr=False, compare=False, default_factory=FleetModel)
    is_trusted: bool = field(init=False, repr=False, compare=False, default=True)
    _pods: dict[Endpoint, PodModel] = field(init=False, repr=False, compare=False, default_factory=dict)
    _legs: dict[Exchange, tuple[PodModel, Leg]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _prices: Prices = field(init=False, repr=False, compare=False)
    _key: DataKey[LatencyForecast] = field(init=False, repr=False, compare=False)
    _match: DataKey[PrefixMatch] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._prices = Prices(self.work_cost, self.decode_cost)
        self._key = LATENCY.of(self.name)
        self._match = PREFIX_MATCH.of(self.prefix_match_info_producer_name)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self._key,)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (self._match,)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        state, pods, now = request.state, self._pods, self.clock.now()
        for endpoint in endpoints:
            pod = pods.get(endpoint)
            if pod is None:
                pods[endpoint] = PodModel(endpoint, self.fleet, self._prices, now)
            elif pod.view is not endpoint.view or pod.legs:
                pod.catch_up(now)
        self._judge()
        tokens = (state.read(TOKENIZED_PROMPT) or request.prompt).tokens
        state.write(self._key, Forecast(self, tokens, state.read(self._match)))

    def pre_request(self, exchange: Exchange, endpoint: Endpoint) -> None:
        pod, state = self._pods.get(endpoint), exchange.request.state
        if pod is None:
            return
        prompt = (state.read(TOKENIZED_PROMPT) or exchange.request.prompt).tokens
        uncached = exchange.charge[0] if exchange.charge else prompt
        self._legs[exchange] = (pod, pod.dispatch(exchange, uncached, prompt, self.clock.now()))

    def post_response(self, exchange: Exchange, endpoint: Endpoint) -> None:
        known = self._legs.pop(exchange, None)
        if known is not None:
            pod, leg = known
            pod.end(leg, self.clock.now())

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._pods.pop(endpoint, None)

    @property
    def error(self) -> float:
        """Of recent predictions; see `FleetModel.error`."""
        return self.fleet.error

    def models(self, endpoints: Sequence[Endpoint]) -> list[PodModel]:
        """Of endpoints that `produce` has seen."""
        return list(map(self._pods.__getitem__, endpoints))

    def _judge(self) -> None:
        error, limit = self.fleet.error, self.max_relative_error
        if self.is_trusted and error > limit:
            self.is_trusted = False
            log.warning(UNTRUSTED, self.name, 100 * error, 100 * limit)
        elif not self.is_trusted and error < TRUST_AGAIN * limit:
            self.is_trusted = True
            log.warning("%s: predictions are off by %.0f %% and trusted again", self.name, 100 * error)


class Forecast(LatencyForecast):
    """Lives as long as its request."""

    __slots__ = ("_match", "_producer", "_tokens")

    def __init__(self, producer: PredictedLatencyProducer, tokens: int, match: PrefixMatch | None) -> None:
        self._producer = producer
        self._tokens = tokens
        self._match = match

    @property
    def is_trusted(self) -> bool:
        return self._producer.is_trusted

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        now, twice = self._producer.clock.now(), 2 * self._tokens
        return [
            pod.base
            + (left if (left := pod.due - now) > 0.0 else left * pod.patience)
            + uncached * (pod.per_token + pod.per_pair * (twice - uncached))
            for pod, uncached in zip(self._producer.models(endpoints), self._missing(endpoints), strict=True)
        ]

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        now, tokens = self._producer.clock.now(), self._tokens
        pods = self._producer.models(endpoints)
        return [pod.ttft(uncached, tokens, now) for pod, uncached in zip(pods, self._missing(endpoints), strict=True)]

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [pod.tpot() for pod in self._producer.models(endpoints)]

    def _missing(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        tokens, match = self._tokens, self._match
        return match.missing(endpoints, tokens) if match is not None else [tokens] * len(endpoints)
