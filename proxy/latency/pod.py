"""What is known of one pod: the prompts it has before it, and how long it takes for them and for each token."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from proxy.core.exchange import Exchange
from proxy.latency.regression import Regression

PREFILL_ALLOWANCE = 0.1
DECODE_ALLOWANCE = 0.002

FIRST_PREFILL = (0.02, 0.1, 0.0)
FIRST_DECODE = (0.01, 0.01)

MEMORY = 0.98
FLEET_MEMORY = 0.998
SPEED_MEMORY = 0.85
SPEED_TRUST = 1.0
MOST_SURPRISE = 3.0
PATIENCE = 0.5


@dataclass(slots=True, eq=False)
class Leg:
    exchange: Exchange
    uncached: float
    features: tuple[float, float, float]
    shaped: float
    service: float = -1.0
    decoding_at: float = 0.0
    running_then: float = 0.0
    prefilled_then: float = 0.0


def prefill_features(step: float, uncached: float, prompt: float) -> tuple[float, float, float]:
    return (100.0 * step, uncached * 1e-3, uncached * (prompt - 0.5 * uncached) * 1e-7)


class PodModel:
    def __init__(self, fleet: FleetModel, now: float) -> None:
        self.fleet = fleet
        self.prefill = Regression(fleet.prefill, MEMORY, 10.0)
        self.decode = Regression(fleet.decode, MEMORY, 10.0)
        self._seen = SPEED_TRUST * fleet.speed
        self._expected = SPEED_TRUST
        self.speed = fleet.speed
        self.legs: deque[Leg] = deque()
        self.queued = 0.0
        """Seconds of prefill at speed 1 of all legs that have not answered."""
        self.since = now
        self.decoding = 0
        self.pending = 0.0
        self.capacity = 0.0
        self.per_freed = 0.0
        self._freed = 0.0
        self._freeing = 0.0
        self._freed_at = now
        self._running = 0.0
        self._running_at = now
        self.prefilled = 0.0
        self.rest = 0.0
        self.due = now
        self.patience = 0.0
        self.fixed = self.per_token = self.per_pair = 0.0
        self.step = self.per_running = 0.0
        self._publish()

    def dispatch(self, exchange: Exchange, uncached: int, prompt: int, now: float) -> Leg:
        features = prefill_features(self.step + self.per_running * self.decoding, uncached, prompt)
        leg = Leg(exchange, uncached, features, self.prefill.predict(features))
        if not self.legs:
            self.since = now
        self.legs.append(leg)
        self.pending += uncached
        self.queued += leg.shaped
        self._publish()
        return leg

    def catch_up(self, now: float) -> None:
        """Legs answer in the order in which they were sent."""
        legs = self.legs
        while legs and (at := legs[0].exchange.first_byte_at) is not None:
            self._answered(legs.popleft(), at)
        self._publish()

    def end(self, leg: Leg, now: float) -> None:
        if leg.service < 0.0:
            at = leg.exchange.first_byte_at
            try:
                self.legs.remove(leg)
            except ValueError:
                return
            if at is None:
                self.pending -= leg.uncached
                self.queued = max(0.0, self.queued - leg.shaped)
                self._publish()
                return
            self._answered(leg, at)
        self._count_running(now)
        self.decoding -= 1
        usage = leg.exchange.usage
        freed = leg.uncached + (usage.completion_tokens if usage is not None else leg.exchange.chunks)
        self._freed = 0.95 * self._freed + freed
        self._freeing = 0.95 * self._freeing + min(5.0, now - self._freed_at)
        self._freed_at = now
        self.per_freed = self._freeing / self._freed
        self._learn(leg, now)
        self._publish()

    def _answered(self, leg: Leg, at: float) -> None:
        self.pending = self.pending - leg.uncached if self.legs else 0.0
        leg.service = max(0.0, at - max(self.since, leg.exchange.started_at))
        self.since = max(self.since, at)
        self.queued = max(0.0, self.queued - leg.shaped) if self.legs else 0.0
        shaped = self.prefill.predict(leg.features)
        predicted = self.speed * shaped
        most = MOST_SURPRISE * predicted
        self.fleet.judge(predicted, leg.service)
        self._seen = SPEED_MEMORY * self._seen + min(most, max(predicted / MOST_SURPRISE, leg.service))
        self._expected = SPEED_MEMORY * self._expected + shaped
        self.speed = self._seen / self._expected
        self.prefilled += predicted
        self._count_running(at)
        self.decoding += 1
        leg.decoding_at, leg.running_then, leg.prefilled_then = at, self._running, self.prefilled

    def _learn(self, leg: Leg, now: float) -> None:
        exchange = leg.exchange
        usage = exchange.usage
        if not exchange.succeeded or not exchange.request.stream:
            return
        features = leg.features
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
            prompt = exchange.request.prompt.tokens
            features = prefill_features(features[0] * 0.01, prompt * (1.0 - usage.cached_tokens / usage.prompt_tokens), prompt)
        self.prefill.observe(features, leg.service / self.speed, PREFILL_ALLOWANCE)
        self.fleet.prefill.observe(features, leg.service / self.speed, PREFILL_ALLOWANCE)
        tokens = usage.completion_tokens if usage is not None else exchange.chunks
        if tokens > 1 and (seconds := now - leg.decoding_at) > 0.0:
            own = max(0.0, seconds - (self.prefilled - leg.prefilled_then)) / (tokens - 1)
            running = (self._running - leg.running_then) / seconds
            self.decode.observe((1.0, running * 0.1), own, DECODE_ALLOWANCE)
            self.fleet.decode.observe((1.0, running * 0.1), own, DECODE_ALLOWANCE)
            self.fleet.output += 0.02 * (tokens - self.fleet.output)

    def _count_running(self, now: float) -> None:
        self._running += self.decoding * max(0.0, now - self._running_at)
        self._running_at = max(self._running_at, now)

    def _publish(self) -> None:
        speed = self.speed
        fixed, per_token, per_pair = self.prefill.coefficients
        self.fixed, self.per_token, self.per_pair = 100.0 * speed * fixed, speed * per_token * 1e-3, speed * per_pair * 1e-7
        self.step, per_ten = self.decode.coefficients
        self.per_running = per_ten * 0.1
        if self.legs:
            first = self.legs[0].shaped
            self.due = self.since + speed * first
            self.rest = speed * (self.queued - first)
            self.patience = -PATIENCE
        else:
            self.rest, self.patience = 0.0, 0.0


class FleetModel:
    def __init__(self) -> None:
        self.prefill = Regression(FIRST_PREFILL, FLEET_MEMORY, 0.1)
        self.decode = Regression(FIRST_DECODE, FLEET_MEMORY, 0.1)
        self.speed = 1.0
        self.output = 200.0
        self.error = 0.0
        self._off = 0.0
        self._seen = 1e-9

    def judge(self, predicted: float, seen: float) -> None:
        self._off = 0.98 * self._off + abs(predicted - seen)
        self._seen = 0.98 * self._seen + seen
        self.error = self._off / self._seen
