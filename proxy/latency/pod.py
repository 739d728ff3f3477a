"""What is known of one pod: the prompts before it, and how long it takes for prompts and for tokens."""

from __future__ import annotations

from collections import deque

from proxy.core.exchange import Exchange
from proxy.latency.regression import Regression

PREFILL_ALLOWANCE = 0.05
DECODE_ALLOWANCE = 0.002

FIRST_PREFILL = (1.0, 0.1, 0.0)
FIRST_DECODE = (0.01, 0.002)

MEMORY = 0.98
FLEET_MEMORY = 0.998
TRUST = 10.0
SPEED_MEMORY = 0.8
MOST_SURPRISE = 3.0
PATIENCE = 0.5
TOGETHER = 0.003
RESIDUE = 0.5


class Leg:
    __slots__ = ("decoding_from", "exchange", "group", "pairs", "prefilled_before", "prompt", "running_before", "tokens")

    def __init__(self, exchange: Exchange, tokens: float, prompt: float) -> None:
        self.exchange = exchange
        self.prompt = prompt
        self.tokens = tokens
        self.pairs = pairs(tokens, prompt)
        self.group: Group | None = None
        self.decoding_from = self.running_before = self.prefilled_before = 0.0


class Group:
    """Prompts that were answered together."""

    __slots__ = ("at", "open", "pairs", "seconds", "start", "steps", "tokens")

    def __init__(self, start: float, at: float, steps: float) -> None:
        self.start = start
        self.at = at
        self.steps = steps
        self.tokens = 0.0
        self.pairs = 0.0
        self.open = 0

    @property
    def features(self) -> tuple[float, float, float]:
        return (self.steps * 100.0, self.tokens * 1e-3, self.pairs * 1e-7)


def pairs(tokens: float, prompt: float) -> float:
    return tokens * (prompt - 0.5 * tokens)


class PodModel:
    def __init__(self, fleet: FleetModel, now: float) -> None:
        self.fleet = fleet
        self.prefill = Regression(fleet.prefill, MEMORY, TRUST)
        self.decode = Regression(fleet.decode, MEMORY, TRUST)
        self._seen = self._expected = 1.0
        self.speed = 1.0
        self.legs: deque[Leg] = deque()
        self.tokens = 0.0
        self.pairs = 0.0
        self.since = now
        self.group: Group | None = None
        self.decoding = 0
        self._running = 0.0
        self._running_at = now
        self._prefilled = 0.0
        self.publish()

    def dispatch(self, exchange: Exchange, uncached: int, prompt: int, now: float) -> Leg:
        leg = Leg(exchange, uncached, prompt)
        if not self.legs:
            self.since = now
        self.legs.append(leg)
        self.tokens += leg.tokens
        self.pairs += leg.pairs
        self.publish()
        return leg

    def catch_up(self, now: float) -> None:
        """Legs answer in the order in which they were sent."""
        legs = self.legs
        while legs and (at := legs[0].exchange.first_byte_at) is not None:
            self._answered(legs.popleft(), at)
        if self.group is not None and now > self.group.at + TOGETHER:
            self._close()
        self.publish()

    def end(self, leg: Leg, now: float) -> None:
        if leg.group is None:
            self.legs.remove(leg)
            at = leg.exchange.first_byte_at
            if at is None:
                self._forget_pending(leg)
                self.publish()
                return
            self._answered(leg, at)
        self._count_running(now)
        self.decoding -= 1
        self._learn(leg, now)
        self.publish()

    def _forget_pending(self, leg: Leg) -> None:
        if self.legs:
            self.tokens -= leg.tokens
            self.pairs -= leg.pairs
        else:
            self.tokens = self.pairs = 0.0

    def _answered(self, leg: Leg, at: float) -> None:
        group = self.group
        if group is not None and at > group.at + TOGETHER:
            self._close()
            group = None
        if group is None:
            sent = leg.exchange.started_at
            waited = sent <= self.since
            self.group = group = Group(max(self.since, sent), at, self.step_now() * (1.0 if waited or not self.decoding else 1.0 + RESIDUE))
        group.tokens += leg.tokens
        group.pairs += leg.pairs
        group.open += 1
        leg.group = group
        self._forget_pending(leg)
        self.since = max(self.since, at)
        self._count_running(at)
        self.decoding += 1
        leg.decoding_from, leg.running_before, leg.prefilled_before = at, self._running, self._prefilled

    def _close(self) -> None:
        group = self.group
        assert group is not None
        self.group = None
        expected = self.prefill.predict(group.features)
        seconds = max(0.0, group.at - group.start)
        predicted = self.speed * expected
        self.fleet.judge(predicted, seconds)
        self._seen = SPEED_MEMORY * self._seen + min(MOST_SURPRISE * predicted, max(predicted / MOST_SURPRISE, seconds))
        self._expected = SPEED_MEMORY * self._expected + expected
        self.speed = min(10.0, max(0.1, self._seen / self._expected))
        self._prefilled += seconds - group.steps
        if group.open == 0:
            self._learn_group(group)

    def _learn(self, leg: Leg, now: float) -> None:
        exchange, group = leg.exchange, leg.group
        assert group is not None
        usage = exchange.usage
        if usage is not None and usage.cached_tokens is not None and usage.prompt_tokens:
            tokens = leg.prompt * (1.0 - usage.cached_tokens / usage.prompt_tokens)
            group.tokens += tokens - leg.tokens
            group.pairs += pairs(tokens, leg.prompt) - leg.pairs
        group.open -= 1
        if group.open == 0 and group is not self.group:
            self._learn_group(group)
        tokens = usage.completion_tokens if usage is not None else exchange.chunks
        if tokens > 1 and (seconds := now - leg.decoding_from) > 0.0:
            own = max(0.0, seconds - (self._prefilled - leg.prefilled_before)) / (tokens - 1)
            running = (self._running - leg.running_before) / seconds
            self.decode.observe((1.0, running * 0.1), own, DECODE_ALLOWANCE)
            self.fleet.decode.observe((1.0, running * 0.1), own, DECODE_ALLOWANCE)
            self.fleet.output += 0.02 * (tokens - self.fleet.output)

    def _learn_group(self, group: Group) -> None:
        features, seconds = group.features, max(0.0, group.at - group.start)
        self.prefill.observe(features, seconds, PREFILL_ALLOWANCE)
        self.fleet.prefill.observe(features, seconds, PREFILL_ALLOWANCE)

    def _count_running(self, now: float) -> None:
        self._running += self.decoding * max(0.0, now - self._running_at)
        self._running_at = max(self._running_at, now)

    def step_now(self) -> float:
        return max(0.001, self.step + self.per_running * self.decoding)

    def publish(self) -> None:
        speed = self.speed
        fixed, per_token, per_pair = self.prefill.current()
        self.fixed, self.per_token, self.per_pair = 100.0 * speed * fixed, speed * per_token * 1e-3, speed * per_pair * 1e-7
        self.step, per_ten = self.decode.current()
        self.per_running = per_ten * 0.1
        if self.legs:
            first = self.legs[0]
            own = first.tokens * self.per_token + first.pairs * self.per_pair
            self.due = self.since + own + self.fixed * self.step_now()
            self.rest = self.tokens * self.per_token + self.pairs * self.per_pair - own
            self.patience = -PATIENCE
        else:
            self.due = self.since
            self.rest = self.patience = 0.0


class FleetModel:
    def __init__(self) -> None:
        self.prefill = Regression((0.01, 0.1, 0.0), FLEET_MEMORY, 0.1)
        self.decode = Regression(FIRST_DECODE, FLEET_MEMORY, 0.1)
        self.output = 200.0
        self.error = 0.0
        self._off = 0.0
        self._seen = 1e-9

    def judge(self, predicted: float, seen: float) -> None:
        self._off = 0.98 * self._off + abs(predicted - seen)
        self._seen = 0.98 * self._seen + seen
        self.error = self._off / self._seen
