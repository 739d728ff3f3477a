"""Predict the time to first token on each pod from its past responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from proxy.core.attempt import WHOLE, Attempt, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration, param
from proxy.core.plugin import DataProducer, EndpointRemoved, PostResponse, PreRequest, plugin
from proxy.core.ports import Clock, InstanceName
from proxy.core.request import DataKey, InferenceRequest
from proxy.core.state import PluginState
from proxy.latency.forecast import LATENCY
from proxy.latency.lockstep import Lockstep
from proxy.latency.pod import LEAST_OBSERVED, PodModel, Prices, Work, catch_up, charge_lockstep, costs, seconds
from proxy.latency.rates import FleetModel
from proxy.prefix.match import TOKENIZED_PROMPT, PrefixMatch, reads_prefix_match

NOTHING_HELD: Mapping[Endpoint, int] = MappingProxyType({})

UNUSED = "accepted and without effect: "


@plugin("predicted-latency-producer")
@dataclass
class PredictedLatencyProducer(DataProducer, PreRequest, PostResponse, EndpointRemoved):
    """Learns for each pod what an engine step, an uncached prompt token and a running request cost, from the times of
    the first and last bytes of streams and the cached tokens that they report. It needs no training server and no
    profile. An unknown pod is assumed to be like the others."""

    uses: ClassVar[tuple[DataKey[Any], ...]] = (TOKENIZED_PROMPT,)
    waits: ClassVar[bool] = False
    name: InstanceName
    clock: Clock
    state: PluginState
    work_cost: float = param(
        0.2,
        "cost for later requests of a second that a pod works on the prompt, in seconds of waiting",
        at_least=0,
    )
    decode_cost: float = param(
        0.03, "cost of a second of delay of a running response, in seconds before its start", at_least=0
    )
    match: DataKey[PrefixMatch] = reads_prefix_match()
    in_flight_load_producer_name: str = param("", UNUSED + "the proxy counts what is in flight by itself")
    slo_buffer_factor: float = param(1.0, UNUSED + "objectives are taken as they are")
    context_ttl: Duration = param(Duration(300.0), UNUSED + "what is known of a request ends with it", key="contextTTL")
    streaming_mode: bool = param(False, UNUSED + "streaming is a property of each request")
    endpoint_role_label: str = param("", UNUSED + "each pod is learnt by itself")
    predict_in_produce: bool = param(True, UNUSED + "predictions are made when pods are scored")
    sampling_mean: float = param(1000.0, UNUSED + "predictions are not renewed during a response")
    max_decode_token_samples_for_prediction: int = param(0, UNUSED + "as samplingMean")
    use_encoder_cache_features: bool = param(False, UNUSED + "images count by their tokens")
    encoder_cache_match_info_producer_name: str = param("", UNUSED + "images count by their tokens")

    def __post_init__(self) -> None:
        self.fleet = self.state.get("fleet", FleetModel)
        self._pods: dict[Endpoint, PodModel] = self.state.get("pods", dict)
        self._work: dict[Attempt, tuple[PodModel, Work]] = self.state.get("work", dict)
        self._last_endpoints: Sequence[Endpoint] | None = None
        self._last_models: list[PodModel] = []
        """The models of `_last_endpoints`."""
        locksteps = (pod.lockstep for pod in self._pods.values() if pod.lockstep is not None)
        self.locksteps = list(dict.fromkeys(locksteps))
        """Locksteps of the pods with data-parallel ranks."""
        self._prices = Prices(self.work_cost, self.decode_cost)
        self.state.at_commit(self._apply_prices)
        self._key: DataKey[Forecast] = DataKey(LATENCY.kind, self.name)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self._key,)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        state = request.state
        prompt = state.read(TOKENIZED_PROMPT) or request.prompt
        state.write(self._key, _forecast((self, prompt.tokens, state.read(self.match))))

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        try:
            pod = self._pods[endpoint]
        except KeyError:  # no plugin reads predictions
            return
        if attempt.sent_at is not None:  # Envoy sent it, at an unknown time, and its prompt is computed
            return
        request = attempt.request
        forecast = request.state.read(self._key)
        prompt = forecast.tokens if forecast is not None else request.prompt.tokens
        uncached = attempt.charge[0] if attempt.charge else prompt
        if attempt.stage is WHOLE:
            work = pod.dispatch(attempt, uncached, prompt, attempt.started_at)
        elif attempt.stage is Stage.ENCODE:
            return
        else:
            work = pod.dispatch_stage(attempt, uncached, prompt, attempt.started_at)
        self._work[attempt] = (pod, work)

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        known = self._work.pop(attempt, None)
        if known is not None:
            pod, work = known
            pod.end(work, self.clock.now())

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        pod = self._pods.pop(endpoint, None)
        if pod is not None and pod.lockstep is not None:
            pod.lockstep.leave(pod)
            if not pod.lockstep.models:
                self.locksteps.remove(pod.lockstep)
        self._last_endpoints, self._last_models = None, []

    @property
    def error(self) -> float:
        """Return the error of recent predictions; see `FleetModel.error`."""
        return self.fleet.error

    def backlog(self, endpoints: Sequence[Endpoint]) -> float | None:
        """Return the sum over these pods of the seconds until each could start another prompt; None before any response
        was learned from."""
        if not self.fleet.prefill.observed:
            return None
        now = self.clock.now()
        return sum(pod.rest + max(pod.due - now, 0.0) for pod in self.models(endpoints, now))

    def pace(self, endpoint: Endpoint) -> tuple[float, float] | None:
        """Return the seconds of a prompt of usual length and of a completion token on an idle pod; None while there are
        too few observations."""
        pod = self._pods.get(endpoint)
        if pod is None or pod.rates.prefill.observed < LEAST_OBSERVED:
            return None
        rates = pod.rates
        return rates.fixed + rates.slowness * rates.step + self.fleet.prompt * rates.per_token, rates.alone

    def models(self, endpoints: Sequence[Endpoint], now: float) -> list[PodModel]:
        """Return the models of these pods, updated with all observations."""
        pods = self.known(endpoints, now)
        catch_up(pods, now)
        return pods

    def known(self, endpoints: Sequence[Endpoint], now: float) -> list[PodModel]:
        """Return the models of these pods without an update."""
        if endpoints is self._last_endpoints:  # the fleet hands out the same tuple until it changes
            return self._last_models
        found = [self._pods.get(endpoint) or self._new_model(endpoint, now) for endpoint in endpoints]
        if isinstance(endpoints, tuple) and len(endpoints) > 1:
            self._last_endpoints, self._last_models = endpoints, found
        return found

    def _new_model(self, endpoint: Endpoint, now: float) -> PodModel:
        pod = self._pods[endpoint] = PodModel(endpoint, self.fleet, self._prices, now, self._lockstep_of(endpoint))
        return pod

    def _lockstep_of(self, endpoint: Endpoint) -> Lockstep | None:
        """Return the state that the ranks of a pod share; None for a pod without ranks."""
        if endpoint.rank is None:
            return None
        known = (pod.lockstep for rank in endpoint.ranks if (pod := self._pods.get(rank)) is not None)
        if (lockstep := next(known, None)) is None:
            lockstep = Lockstep(self.fleet)
            self.locksteps.append(lockstep)
        return lockstep

    def _apply_prices(self) -> None:
        """Update the models of the previous producer, which had other costs."""
        self.fleet.changed = self._refresh_unobserved
        for pod in self._pods.values():
            pod.set_prices(self._prices)

    def _refresh_unobserved(self) -> None:
        """Give pods without own observations the new coefficients of the fleet. Otherwise a used pod would be compared
        with idle pods that have older coefficients."""
        for pod in self._pods.values():
            if not pod.rates.prefill.observed or not pod.rates.decode.observed:
                pod.refresh()


class Forecast(NamedTuple):
    """The forecast for one request. Lives as long as the request."""

    producer: PredictedLatencyProducer
    tokens: int
    """Number of tokens of the prompt."""
    match: PrefixMatch | None

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        producer, tokens, match = self
        now = producer.clock.now()
        cold, size, held = match.lacks(endpoints, tokens) if match is not None else (tokens, 0, NOTHING_HELD)
        pods = producer.known(endpoints, now)
        found = costs(pods, 1.0 * cold, 1.0 * size, held, 1.0 * tokens, now)
        if producer.locksteps and any(lockstep.share for lockstep in producer.locksteps):
            charge_lockstep(pods, found, 1.0 * cold, 1.0 * size, held, 1.0 * tokens, now)
        return found

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        producer, tokens, _ = self
        now = producer.clock.now()
        pods = zip(producer.models(endpoints, now), self._missing(endpoints), strict=True)
        return [seconds(pod, left, tokens, now) for pod, left in pods]

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [pod.tpot for pod in self.producer.models(endpoints, self.producer.clock.now())]

    def delays(self, endpoints: Sequence[Endpoint]) -> list[float]:
        producer, tokens, _ = self
        pods = producer.models(endpoints, producer.clock.now())
        return [pod.delay(left, tokens) for pod, left in zip(pods, self._missing(endpoints), strict=True)]

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        producer, tokens, _ = self
        (pod,) = producer.models((endpoint,), producer.clock.now())
        return pod.work(uncached, tokens)

    @property
    def output(self) -> float:
        return self.producer.fleet.output

    def _missing(self, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        match, tokens = self.match, self.tokens
        if match is None:
            return [tokens] * len(endpoints)
        cold, size, units = match.lacks(endpoints, tokens)
        return [max(0, cold - size * units.get(endpoint, 0)) for endpoint in endpoints]


_forecast = partial(tuple.__new__, Forecast)
"""Creates a forecast from a tuple of its fields, without the Python frame of a NamedTuple's own constructor."""
