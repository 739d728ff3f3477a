"""Compute a prompt on another pod if that costs fewer seconds, for it and for the answers that it would hold up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange, Stage
from proxy.core.params import param
from proxy.core.plugin import Decider, PostResponse, PreRequest, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import InferenceRequest
from proxy.latency.keys import LATENCY, LatencyForecast
from proxy.latency.transfer import Transfer
from proxy.prefix.keys import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch


@plugin("predicted-latency-pd-decider")
@dataclass(slots=True)
class PredictedLatencyPdDecider(Decider, PreRequest, PostResponse):
    """Wants it if that costs fewer seconds. Local: the time to first token on the decode pod. Remote: that on the best
    prefill pod, and the transfer of what the decode pod lacks. Both: `interferenceCost` per second by which answers
    that run there come later. What transfers take is learnt from requests that stream. While predictions cannot be
    trusted, it wants it if the decode pod lacks at least `nonCachedTokens`.
    """

    name: InstanceName
    interference_cost: float = param(
        1.0, "what a second of delay costs an answer that runs, in seconds before the start of this one", at_least=0
    )
    transfer_seconds_per_token: float = param(
        2e-5, "what a transfer is taken to last until some were seen, per token of the prompt", at_least=0
    )
    transfer_seconds: float = param(0.01, "the same of what each takes at all, the decode pod's first step", at_least=0)
    non_cached_tokens: int = param(
        512, "prompt tokens that the decode pod must lack while predictions are not trusted", at_least=1
    )
    prefix_match_info_producer_name: str = param("", "whose matches to read; empty: those of the only producer")
    latency_prediction_info_producer_name: str = param(
        "", "whose predictions to read; empty: those of the only producer"
    )
    transfer: Transfer = field(init=False, repr=False, compare=False)
    _match: DataKey[PrefixMatch] = field(init=False, repr=False, compare=False)
    _forecast: DataKey[LatencyForecast] = field(init=False, repr=False, compare=False)
    _prefill: DataKey[Exchange] = field(init=False, repr=False, compare=False)
    _tokens: DataKey[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.transfer = Transfer(self.transfer_seconds, self.transfer_seconds_per_token)
        self._match = PREFIX_MATCH.of(self.prefix_match_info_producer_name)
        self._forecast = LATENCY.of(self.latency_prediction_info_producer_name)
        self._prefill = DataKey("PrefillLeg", self.name)
        self._tokens = DataKey("TransferTokens", self.name)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (self._match, self._forecast)

    def adopt(self, predecessor: PredictedLatencyPdDecider) -> None:
        """What it has learnt, unless it is told something else to begin with."""
        mine = (self.transfer_seconds, self.transfer_seconds_per_token)
        if mine == (predecessor.transfer_seconds, predecessor.transfer_seconds_per_token):
            self.transfer = predecessor.transfer

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        """Whether it could pay, if a pod could compute the prompt in no time."""
        tokens, forecast = self._missing(request, decode), self._trusted(request)
        if forecast is None:
            return tokens >= self.non_cached_tokens
        return tokens > 0 and self.transfer.seconds(tokens) < self._cost(forecast, decode)

    def confirms(self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]) -> bool:
        forecast = self._trusted(request)
        if forecast is None:
            return True
        remote = self._cost(forecast, prefill[0]) + self.transfer.seconds(self._missing(request, decode))
        return remote < self._cost(forecast, decode)

    def pre_request(self, exchange: Exchange, endpoint: Endpoint) -> None:
        state = exchange.request.state
        if exchange.stage is Stage.PREFILL:
            state[self._prefill] = exchange
        elif exchange.stage is Stage.DECODE:
            state[self._tokens] = self._missing(exchange.request, endpoint)

    def post_response(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """The first byte of an answer that streams comes when the cache has, and one step after."""
        state, begun = exchange.request.state, exchange.first_byte_at
        if exchange.stage is not Stage.DECODE or not exchange.request.stream or begun is None:
            return
        prefill, tokens = state.read(self._prefill), state.read(self._tokens)
        if prefill is None or tokens is None or prefill.last_byte_at is None or not exchange.succeeded:
            return
        self.transfer.observe(tokens, max(0.0, begun - prefill.last_byte_at))

    def _cost(self, forecast: LatencyForecast, endpoint: Endpoint) -> float:
        (ttft,), (delay,) = forecast.ttfts((endpoint,)), forecast.delays((endpoint,))
        return ttft + self.interference_cost * delay

    def _trusted(self, request: InferenceRequest) -> LatencyForecast | None:
        forecast = request.state.read(self._forecast)
        return forecast if forecast is not None and forecast.is_trusted else None

    def _missing(self, request: InferenceRequest, endpoint: Endpoint) -> int:
        prompt, match = request.state.read(TOKENIZED_PROMPT) or request.prompt, request.state.read(self._match)
        return prompt.tokens if match is None else max(0, prompt.tokens - match.blocks_on(endpoint) * match.block_size)
