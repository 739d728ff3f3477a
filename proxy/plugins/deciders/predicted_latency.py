"""Prefill a prompt on another pod if that costs fewer seconds, including the delay of other responses."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import EndpointRemoved, PairDecider, PostResponse, PreRequest, plugin
from proxy.core.ports import Clock, InstanceName
from proxy.core.request import DataKey, InferenceRequest
from proxy.core.state import PluginState
from proxy.latency.forecast import STAGE_COST, LatencyForecast, reads_forecast
from proxy.latency.transfer import PrefillShare, TransferModel
from proxy.prefix.match import TOKENIZED_PROMPT, PrefixMatch, reads_prefix_match


@plugin("predicted-latency-pd-decider")
@dataclass
class PredictedLatencyPdDecider(PairDecider, PreRequest, PostResponse, EndpointRemoved):
    """Splits a request if that costs fewer seconds. One pod: the time to first token, `interferenceCost` per second of
    delay of the responses that run there, and `answerCost` of the response, which is slower the more prompts that pod
    computes. Two pods: the same where prompt and response cost least, and the transfer. The time of transfers is learnt
    from streamed responses.
    """

    uses: ClassVar[tuple[DataKey[Any], ...]] = (TOKENIZED_PROMPT, STAGE_COST)
    name: InstanceName
    clock: Clock
    state: PluginState
    interference_cost: float = param(
        0.4, "cost of a second of delay of a running response, in seconds before the start of this one", at_least=0
    )
    answer_cost: float = param(
        0.5, "cost of a second between the first and the last token, in seconds before the first", at_least=0
    )
    transfer_seconds_per_token: float = param(
        2e-5, "assumed seconds of a transfer per prompt token until transfers were measured", at_least=0
    )
    transfer_seconds: float = param(
        0.01, "assumed fixed seconds of a transfer, for a step of the decode pod", at_least=0
    )
    match: DataKey[PrefixMatch] = reads_prefix_match()
    forecast: DataKey[LatencyForecast] = reads_forecast()

    def __post_init__(self) -> None:
        first = (self.transfer_seconds, self.transfer_seconds_per_token)
        self.transfer = self.state.get("transfer", lambda: TransferModel(*first), first)
        self.prefill_share = self.state.get("prefill_share", PrefillShare)
        self._prefill: DataKey[Attempt] = DataKey("PrefillLeg", self.name)
        self._tokens: DataKey[int] = DataKey("TransferTokens", self.name)

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        """Return whether a split could be faster if a pod computed the prompt in no time."""
        tokens, forecast = self._missing(request, decode), request.state.read(self.forecast)
        if forecast is None:
            return False
        return tokens > 0 and self.transfer.seconds(tokens) < self.prompt_cost(forecast, decode)

    @contextmanager
    def pricing(self, request: InferenceRequest, stage: Stage) -> Generator[None, None, None]:
        forecast = request.state.read(self.forecast)
        if forecast is not None:
            is_prefill = stage is Stage.PREFILL
            request.state[STAGE_COST] = (
                partial(self.prompt_cost, forecast) if is_prefill else partial(self.decode_cost, forecast, request)
            )
        try:
            yield
        finally:
            request.state.pop(STAGE_COST, None)

    def prefers(
        self, request: InferenceRequest, whole: Endpoint, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> bool:
        forecast = request.state.read(self.forecast)
        if forecast is None:
            return False
        shared = self.prompt_cost(forecast, prefill[0]) + self.decode_cost(forecast, request, decode)
        return shared < self.prompt_cost(forecast, whole) + self._response_cost(forecast, whole)

    def prompt_cost(self, forecast: LatencyForecast, endpoint: Endpoint) -> float:
        (ttft,), (delay,) = forecast.ttfts((endpoint,)), forecast.delays((endpoint,))
        return ttft + self.interference_cost * delay

    def decode_cost(self, forecast: LatencyForecast, request: InferenceRequest, endpoint: Endpoint) -> float:
        return self.transfer.seconds(self._missing(request, endpoint)) + self._response_cost(forecast, endpoint)

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        state, forecast = attempt.request.state, attempt.request.state.read(self.forecast)
        if attempt.stage is Stage.DECODE:
            state[self._tokens] = self._missing(attempt.request, endpoint)
        elif attempt.stage is not Stage.ENCODE and forecast is not None and attempt.charge is not None:
            self.prefill_share.add(endpoint, forecast.work(endpoint, attempt.charge[0]), self.clock.now())
        if attempt.stage is Stage.PREFILL:
            state[self._prefill] = attempt

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        """Learn from a streamed response, whose first byte comes one step after the transfer."""
        state, begun = attempt.request.state, attempt.first_byte_at
        if attempt.stage is not Stage.DECODE or not attempt.request.stream or begun is None:
            return
        prefill, tokens = state.read(self._prefill), state.read(self._tokens)
        if prefill is None or tokens is None or prefill.last_byte_at is None or not attempt.succeeded:
            return
        self.transfer.observe(tokens, max(0.0, begun - prefill.last_byte_at))

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self.prefill_share.forget(endpoint)

    def _response_cost(self, forecast: LatencyForecast, endpoint: Endpoint) -> float:
        (tpot,) = forecast.tpots((endpoint,))
        return self.answer_cost * forecast.output * tpot / (1.0 - self.prefill_share.of(endpoint, self.clock.now()))

    def _missing(self, request: InferenceRequest, endpoint: Endpoint) -> int:
        prompt, match = request.state.read(TOKENIZED_PROMPT) or request.prompt, request.state.read(self.match)
        return prompt.tokens if match is None else max(0, prompt.tokens - match.blocks_on(endpoint) * match.block_size)
