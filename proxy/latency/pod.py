"""A model of one pod: a queue of prompts that are computed in turn, and answers that go on side by side.

Prompts wait for each other; so the time between two first tokens, or from an idle pod's request to its first token, is
what the prompts answered then have cost: engine steps, and coefficients · (1, tokens, pairs of tokens). The tokens are
those that were thought to be uncached, as they are when a prediction is wanted. The time between the tokens of an
answer, less what prompts took of it, is coefficients · (1, running, tokens held). Both are learnt.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from proxy.core.endpoint import Endpoint, Freshness, LoadView, Metrics
from proxy.core.exchange import Exchange
from proxy.latency.fleet import SHRINK, FleetModel
from proxy.latency.regression import Regression
from proxy.latency.work import PAIR_SCALE, TOKEN_SCALE, Group, Leg, pairs

MEMORY = 0.98
TRUST = 10.0
"""So many observations of a pod's own count as much as all of the others'."""

SOLVE_EVERY = 8
"""Observations; of so many the fleet's coefficients learn from one."""

PREFILL_ALLOWANCE = 0.05
DECODE_ALLOWANCE = 0.002
"""Seconds by which even the shortest prefill, and a token, may be off."""

RUNNING_SCALE, HELD_SCALE = 0.1, 1e-5
SPEED_MEMORY = 0.8
MOST_SURPRISE = 3.0
"""A single observation changes the speed as if it were off by this factor at most."""

SLOWEST, FASTEST = 10.0, 0.1
DOUBT = 0.01
"""So many seconds of prefill, on a pod, of which the speed is taken to be that of the others."""

TOGETHER = 0.003
"""First tokens that come within so many seconds came out of the same step."""

RESIDUE = 0.5
"""Of a step that is under way when a request comes, this share is still to come."""

PATIENCE = 0.5
"""A first token that is overdue is expected after this share of the time it is overdue for."""

LEAST_STEP = 0.001


class Prices(NamedTuple):
    """In seconds before a first token: of a second that a pod works on a prompt, for those who come later, and of a
    second by which an answer under way is delayed, this one and those that run beside it."""

    work: float
    decode: float


class PodModel:
    """Lives as long as the pod's memory. What scoring reads is made where it changes:

        cost(uncached, prompt) = base + (due - now, or what is said by patience) + uncached * (per_token
                                 + per_pair * (2 * prompt - uncached))

    in seconds: the time to the first token, and what it costs others by the `Prices`. `due` is when the prompt under
    way should be done.
    """

    def __init__(self, endpoint: Endpoint, fleet: FleetModel, prices: Prices, now: float) -> None:
        self.endpoint = endpoint
        self._fleet = fleet
        self._prices = prices
        self.prefill = Regression(fleet.prefill, MEMORY, TRUST, SHRINK, SOLVE_EVERY)
        self.decode = Regression(fleet.decode, MEMORY, TRUST, every=SOLVE_EVERY)
        self._seen = self._expected = 0.0
        self.legs: deque[Leg] = deque()
        """Those without a first token, as they were sent."""
        self._tokens = 0.0
        self._pairs = 0.0
        self._since = now
        """When the pod began with the first of them."""
        self._is_exact = True
        self._group: Group | None = None
        self._running = 0
        self._running_at = now
        self._running_sum = 0.0
        self._prefilled = 0.0
        self._scrape = endpoint.metrics
        self._strangers = endpoint.metrics.waiting if endpoint.metrics.freshness is Freshness.FRESH else 0
        self.view: LoadView | None = None
        """The one that what is published was made with; None if more has changed, and while nothing is known of the pod
        but what the fleet is like."""
        self._count_running(now)
        self._publish()

    @property
    def speed(self) -> float:
        """How much longer than the coefficients say prompts have taken of late."""
        seen, expected = self._seen + DOUBT * self._fleet.speed, self._expected + DOUBT
        return min(SLOWEST, max(FASTEST, seen / expected))

    def ttft(self, uncached: float, prompt: float, now: float) -> float:
        """Seconds from now to the first token of a prompt."""
        return self.wait(now) + self._own(uncached, pairs(uncached, prompt))

    def wait(self, now: float) -> float:
        """Seconds until the pod turns to the next prompt."""
        left = self.due - now
        return self._rest + (left if left > 0.0 else left * self.patience)

    def tpot(self) -> float:
        """Seconds per token of one more answer."""
        return self._step + self._per_running

    def dispatch(self, exchange: Exchange, uncached: float, prompt: float, now: float) -> Leg:
        leg = Leg(exchange, uncached, prompt, self.ttft(uncached, prompt, now))
        self._fleet.sent(uncached)
        if not self.legs:
            self._since, self._is_exact = now, True
        self.legs.append(leg)
        self._tokens += leg.tokens
        self._pairs += leg.pairs
        self._publish()
        return leg

    def catch_up(self, now: float) -> None:
        """Learn what has come since; to be called before the pod is scored, if it has `legs` or another view."""
        self._take_answers(now)
        if self.view is not self.endpoint.view:
            self._count_running(now)
            self._publish()

    def end(self, leg: Leg, now: float) -> None:
        """However it ended. What is published follows with the next request."""
        self._take_answers(now)
        if leg.decoding_from is None and leg in self.legs:
            self._drop(leg, now)
        if leg.exchange.succeeded:
            self._learn(leg, now)
        self._count_running(now)
        self.view = None

    def _take_answers(self, now: float) -> None:
        if self._scrape is not self.endpoint.metrics:
            self._compare(self.endpoint.metrics)
        while self.legs and self._take_first(now):
            self.view = None

    def _compare(self, scrape: Metrics) -> None:
        """Who waits there without having been sent by us, or siblings, waits before the next: others' requests, and
        sequences that were pre-empted."""
        self._scrape = scrape
        at = scrape.scraped_at
        ours = sum(_waited(leg.exchange, at) for leg in self.legs)
        known = scrape.freshness is Freshness.FRESH and not self.endpoint.load.remote_requests
        self._strangers = max(0, scrape.waiting - ours) if known else 0

    def _take_first(self, now: float) -> bool:
        """The first in line, if it was answered. What is not streamed gives no sign, and is taken to be in time."""
        leg = self.legs[0]
        exchange = leg.exchange
        if not exchange.request.stream:
            if now < self.due:
                return False
            self._drop(leg, self.due)
            self._is_exact = False
            self._expect()
        elif exchange.first_byte_at is None:
            return False
        elif exchange.status is None or exchange.status >= 300:
            self._drop(leg, exchange.first_byte_at)
        else:
            self._answered(leg, exchange.first_byte_at)
        return True

    def _answered(self, leg: Leg, at: float) -> None:
        sent = leg.exchange.started_at
        if self._group is not None and at > self._group.at + TOGETHER:
            self._close()
        if self._group is None:
            joined = sent > self._since and self._running > 0
            steps = self._step * (1.0 + RESIDUE if joined else 1.0)
            self._group = Group(max(self._since, sent), at, steps, is_exact=self._is_exact)
        self._group.tokens += leg.tokens
        self._group.pairs += leg.pairs
        self._fleet.judge(leg.expected, at - sent)
        self._drop(leg, at)
        self._is_exact = True
        self._count_running(at)
        leg.decoding_from, leg.running, leg.prefilled = at, self._running_sum, self._prefilled

    def _drop(self, leg: Leg, at: float) -> None:
        """It waits no more; if it was the first, the pod turned to the next one then."""
        if self.legs[0] is leg:
            self._since = max(self._since, at)
        self.legs.remove(leg)
        self._tokens = self._tokens - leg.tokens if self.legs else 0.0
        self._pairs = self._pairs - leg.pairs if self.legs else 0.0

    def _close(self) -> None:
        """The group is complete: its cost is known."""
        group, self._group = self._group, None
        if group is None or not group.is_exact:
            return
        self._hurry(group.steps + self.prefill.predict(group.features), group.seconds)
        prefill = max(0.0, group.seconds - group.steps)
        self._prefilled += prefill
        if self.prefill.observe(group.features, prefill, PREFILL_ALLOWANCE):
            self._fleet.prefill.observe(group.features, prefill, PREFILL_ALLOWANCE)

    def _hurry(self, expected: float, seconds: float) -> None:
        """What was seen of late over what the coefficients say: it follows a change before they do."""
        usual = self.speed * expected
        within = min(MOST_SURPRISE * usual, max(usual / MOST_SURPRISE, seconds))
        self._seen = SPEED_MEMORY * self._seen + within
        self._expected = SPEED_MEMORY * self._expected + expected
        self._fleet.hurry(expected, within)

    def _learn(self, leg: Leg, now: float) -> None:
        """From a whole answer. One that was not streamed says only how long all of it took."""
        exchange, usage = leg.exchange, leg.exchange.usage
        if usage is None and leg.decoding_from is None:
            return
        tokens = usage.completion_tokens if usage is not None else exchange.chunks
        self._fleet.answered(tokens)
        if leg.decoding_from is None:
            whole = leg.expected / self.speed + max(0, tokens - 1) * self.tpot()
            self._hurry(whole, now - exchange.started_at)
            return
        seconds = (exchange.last_byte_at or now) - leg.decoding_from
        if tokens > 1 and seconds > 0.0:
            self._count_running(now)
            running = (self._running_sum - leg.running) / (now - leg.decoding_from)
            pace = max(0.0, seconds - (self._prefilled - leg.prefilled)) / (tokens - 1)
            features = (1.0, running * RUNNING_SCALE, self._held)
            if self.decode.observe(features, pace, DECODE_ALLOWANCE):
                self._fleet.decode.observe(features, pace, DECODE_ALLOWANCE)

    def _count_running(self, now: float) -> None:
        if now > self._running_at:
            self._running_sum += self._running * (now - self._running_at)
            self._running_at = now
        view = self.endpoint.view
        self._running = max(0, view.waiting + view.running - len(self.legs))

    def _publish(self) -> None:
        """All that is read until the next change."""
        speed, endpoint, prefill = self.speed, self.endpoint, self.prefill
        fixed, per_token, per_pair = prefill.coefficients
        step, per_running, per_held = self.decode.coefficients
        metrics, view = endpoint.metrics, endpoint.view
        held = view.kv_usage * metrics.blocks * metrics.block_size * HELD_SCALE
        self._held = held
        self._per_running = per_running = per_running * RUNNING_SCALE
        self._step = step = max(LEAST_STEP, step + per_held * held + per_running * self._running)
        self._fixed = speed * (fixed + step)
        self._per_token = per_token = speed * per_token * TOKEN_SCALE
        self._per_pair = per_pair = speed * per_pair * PAIR_SCALE
        self._expect()
        self.view = None if prefill.is_cold else view
        running, (work_cost, decode_cost) = self._running, self._prices
        delayed = 1.0 + work_cost + decode_cost * running
        waiting = len(self.legs)
        decoding = self._fleet.output * (step + per_running * (1 + running + 2 * waiting))
        self.base = self._rest + delayed * self._fixed + decode_cost * decoding
        self.per_token = delayed * per_token
        self.per_pair = delayed * per_pair * 0.5

    def _expect(self) -> None:
        """When the first in line should be answered, and how much stands behind it."""
        self._rest = (self.endpoint.load.remote_tokens + self._strangers * self._fleet.prompt) * self._per_token
        if self.legs:
            first = self.legs[0]
            self.due, self.patience = self._since + self._own(first.tokens, first.pairs), -PATIENCE
            self._rest += (self._tokens - first.tokens) * self._per_token
            self._rest += (self._pairs - first.pairs) * self._per_pair
        else:
            self.due, self.patience = self._since, 0.0
            if self._running:
                self._rest += RESIDUE * self._step

    def _own(self, tokens: float, attended: float) -> float:
        return self._fixed + tokens * self._per_token + attended * self._per_pair


def _waited(exchange: Exchange, at: float) -> bool:
    """For its first token, at that time."""
    answered = exchange.first_byte_at
    return exchange.started_at <= at and (answered is None or answered > at)
