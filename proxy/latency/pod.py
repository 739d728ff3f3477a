"""A model of one pod: a queue of prompts that are computed in turn, and answers that go on side by side.

That is one of two forms; `Beside` is the other, and says how much of the truth this one is. Where prompts wait for each
other, the time between two first tokens, or from an idle pod's request to its first token, is what the prompts answered
then have cost: engine steps, and what `Rates` makes of tokens and pairs of tokens. The tokens are those that were
thought to be uncached, as they are when a prediction is wanted. The time between the tokens of an answer, less what
prompts took of it, depends on how many run. Both are learnt.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from math import inf
from operator import itemgetter
from typing import NamedTuple

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.exchange import Exchange, Stage
from proxy.latency.beside import Beside
from proxy.latency.fleet import FleetModel
from proxy.latency.published import NOBODY, TTFT, Published, seconds
from proxy.latency.rates import Rates
from proxy.latency.staged import StagedLegs, pace_of, waited
from proxy.latency.work import Group, Leg

TOGETHER = 0.003
"""First tokens that come within so many seconds came out of the same step."""

COARSE = 2
"""What so many running requests more or fewer change is worth publishing: one costs less than pods may differ."""

RESIDUE = 0.5
"""Of a step that is under way when a request comes, this share is still to come."""

PATIENCE = 0.5
"""A first token that is overdue is expected after this share of the time it is overdue for."""

LEAST_OBSERVED = 8
"""Prompts. What is predicted after fewer is a guess, and is not judged."""

LESSON_SECONDS, FIRST_LESSONS = 0.25, 16
"""After the first lessons a pod gives one every so many seconds. More say little that is new and cost much: a prompt
and its answer take 600 bytecodes to learn from, 100 to be counted out."""

LEAST_LESSON_SECONDS = 0.05
"""Of a pod that computes prompts side by side, chance hides more."""

BEHIND = 2.0
"""For each prompt in line so many more come before the line has gone."""

MIXED_SECONDS = 0.05
"""For so long holds what is published of a pod that is not quite of one form."""


class Prices(NamedTuple):
    """In seconds before a first token: of a second that a pod works on a prompt, for those who come later, and of a
    second by which an answer under way is delayed, this one and those that run beside it."""

    work: float
    decode: float


class PodModel(Published):
    """Lives as long as the pod's memory. A pod that `changed` finds must catch up before it is scored."""

    def __init__(self, endpoint: Endpoint, fleet: FleetModel, prices: Prices, now: float) -> None:
        self.endpoint = endpoint
        self.rates = Rates(fleet)
        self.beside = Beside(fleet, self.rates)
        self.legs: deque[Leg] = deque()
        """Those without a first token, as they were sent."""
        self._staged = StagedLegs()
        self._fleet = fleet
        self._prices = prices
        self._tokens = self._pairs = 0.0
        self._since = now
        """When the pod began with the first of them."""
        self._is_exact = True
        """It is known when that was."""
        self._group: Group | None = None
        """What is learnt from next."""
        self._step_at = -inf
        """When the step ended that gave the last first token."""
        self._followed = 0
        """Legs under way that something is to be learnt from."""
        self._prefilled = 0.0
        self._lessons = 0
        self._next_group = self._next_leg = now
        self._running = 0
        self._running_at = now
        self._running_sum = 0.0
        self._strange_tokens = 0.0
        self._due = now
        """When the first in line should be answered, if prompts are computed in turn."""
        self._share = 1.0
        """As it was when the pace was published."""
        self._line = 0.0
        """Seconds until a prompt's turn, where what is published is not that."""
        self._compare(endpoint.metrics)
        self.catch_up(now)

    def dispatch(self, exchange: Exchange, uncached: float, prompt: float, now: float) -> Leg:
        """Publishes by itself what changes: the request is in the next forecast."""
        leg = Leg(exchange, uncached, prompt)
        if now >= self._next_leg:
            self._next_leg = self._after_lesson(now)
            self._foretell(leg, prompt, now)
        legs, pairs, (_, per_token, per_pair) = self.legs, leg.pairs, self._in_turn
        legs.append(leg)
        self._tokens += uncached
        self._pairs += pairs
        self.rest += uncached * per_token + pairs * per_pair
        if len(legs) == 1:
            self._since, self._is_exact = now, True
            self._turn_to(leg)
        if self._scrape is self.endpoint.metrics:
            self.view = self.endpoint.view if self._share == 1.0 else None
        return leg

    def dispatch_stage(self, exchange: Exchange, uncached: float, prompt: float, now: float) -> Leg:
        """Of a leg that is not for a whole request. A prompt that another pod answers is in line as any; who answers
        one that another pod computes is in nobody's way, and says how fast answers go."""
        if exchange.stage is Stage.DECODE:
            leg = Leg(exchange, 0.0, prompt)
            leg.waits = False
            if now >= self._next_leg:
                self._next_leg = self._after_lesson(now)
                self._followed += 1
                self._count_running(now)
                leg.expected, leg.running, leg.prefilled = 0.0, self._running_sum, self._prefilled
        else:
            leg = self.dispatch(exchange, uncached, prompt, now)
            leg.shows = True
            if self.legs[0] is leg:
                self.look_at, self.patience = inf, -PATIENCE
        leg.stage = exchange.stage
        self._staged.add(leg)
        return leg

    def delay(self, uncached: float, prompt: float) -> float:
        """Seconds by which others are answered later, all together, for a prompt. In turn with it, each answer stands
        still for what it takes beyond the step that is made anyway. Answers that will begin when another pod has
        computed their prompt count with those that run: most begin before this one would be computed. No scrape shows
        them. Who comes later waits behind it for as long as there is a line."""
        fixed, per_token, per_pair = self._in_turn
        work = fixed - self.step + uncached * (per_token + per_pair * (2.0 * prompt - uncached))
        queued, running, _ = self.endpoint.view
        there = max(queued + running, self.endpoint.load.requests)
        answers = max(0, there - len(self.legs) - self._staged.kept())
        return self._share * max(0.0, work) * (answers + BEHIND * len(self.legs))

    def _foretell(self, leg: Leg, prompt: float, now: float) -> None:
        if self.view is None:
            self.catch_up(now)
        beside = self.beside
        (leg.expected,) = seconds((self,), TTFT, (leg.tokens,), prompt, now)
        in_turn = leg.expected
        if self._share < 1.0:
            fixed, per_token, per_pair = self._in_turn
            in_turn = self._line + fixed + leg.tokens * per_token + leg.pairs * per_pair
        leg.guess = beside.guess(in_turn, leg.tokens, beside.wait(self.endpoint.view, self.legs))
        leg.is_guess = self.rates.prefill.observed < LEAST_OBSERVED
        self._followed += 1

    def catch_up(self, now: float) -> None:
        """With all that has come since; publishes what is read until the next change."""
        endpoint, legs = self.endpoint, self.legs
        if self._scrape is not endpoint.metrics:
            self._compare(endpoint.metrics)
        if legs:
            self._take_answers(now)
        self.view = endpoint.view
        queued, running, _ = endpoint.view
        running += queued - len(legs)
        if not -COARSE < running - self._running < COARSE or not self._is_paced:
            self._publish_pace(max(0, running), now)
        _, per_token, per_pair = self._in_turn
        ahead = self._strange_tokens + endpoint.load.remote_tokens
        if legs:
            self.rest = (ahead + self._tokens) * per_token + self._pairs * per_pair
            self._turn_to(legs[0])
        else:
            self.rest = ahead * per_token + (RESIDUE * self.step if running > 0 else 0.0)
            self.head, self.patience, self.due, self.look_at = NOBODY, 0.0, 0.0, inf
        if self._share < 1.0:
            self._mix(now)

    def _mix(self, now: float) -> None:
        """Publish what comes of both forms, for a while: what is in turn passes with time."""
        beside, left = self.beside, self.due - now
        self._line = line = self.rest + (left if left > 0.0 else left * self.patience)
        share, other = self._share, 1.0 - self._share
        wait, per_token = beside.wait(self.endpoint.view, self.legs)
        self.rest = share * line + other * beside.waits * wait
        self.due = self.patience = 0.0
        self.look_at = now + MIXED_SECONDS
        more = other * (beside.load * beside.per_token + beside.waits * per_token)
        fixed, per_token, per_pair = self._in_turn
        fixed = share * fixed + other * beside.load * beside.fixed
        self.own = (fixed, share * per_token + more, share * per_pair)
        self._publish_cost(share)

    def _turn_to(self, first: Leg) -> None:
        """It is first in line, and not in the rest."""
        fixed, per_token, per_pair = self._in_turn
        work = first.tokens * per_token + first.pairs * per_pair
        self.rest -= work
        self.due = self._due = due = self._since + fixed + work
        self.head = first.exchange
        self.look_at, self.patience = (inf, -PATIENCE) if first.shows else (due, 0.0)

    def price(self, prices: Prices) -> None:
        """By these from here on."""
        self._prices = prices
        self._has_learnt()

    def follow(self) -> None:
        """The fleet, which has learnt something."""
        self.rates.renew()
        self.beside.renew()
        self._has_learnt()

    def end(self, leg: Leg, now: float) -> None:
        """However it ended. What is published follows with the next request."""
        if leg.waits:
            if leg.shows:
                self._take_answers(now)
                if leg.waits:
                    self._drop(leg, now)
            else:
                self._drop(leg, min(now, self._due))
                self._is_exact = False
        if leg.expected is not None:
            self._followed -= 1
            if leg.exchange.succeeded:
                self._learn(leg, leg.expected, now)

    def _has_learnt(self) -> None:
        self._is_paced, self.view = False, None

    def _compare(self, scrape: Metrics) -> None:
        """Who waits there without having been sent by us, or siblings, waits before the next: others' requests, and
        sequences that were pre-empted."""
        self._scrape = scrape
        self.rates.hold(scrape.kv_usage * scrape.blocks * scrape.block_size)
        self._has_learnt()
        self.beside.look(scrape)
        at = scrape.scraped_at
        ours = sum(waited(leg.exchange, at) for leg in chain(self.legs, self._staged.coming()))
        known = scrape.freshness is Freshness.FRESH and not self.endpoint.load.remote_requests
        self._strange_tokens = max(0, scrape.waiting - ours) * self._fleet.prompt if known else 0.0

    def _take_answers(self, now: float) -> None:
        """Of the first in line. What is not streamed gives no sign, and is taken to be in time."""
        legs = self.legs
        if self._share < 1.0:
            self._take_answers_of_all()
        while legs:
            leg = legs[0]
            exchange = leg.exchange
            if not leg.shows:
                if now < self._due:
                    return
                self._drop(leg, self._due)
                self._is_exact = False
                if legs:
                    self._turn_to(legs[0])
            elif exchange.first_byte_at is None:
                return
            else:
                self._answered(leg, exchange.first_byte_at)

    def _take_answers_of_all(self) -> None:
        """In the order in which they came; so they do where prompts are computed side by side."""
        came = [(leg.exchange.first_byte_at, leg) for leg in self.legs if leg.shows]
        answered = [(at, leg) for at, leg in came if at is not None]
        for at, leg in sorted(answered, key=itemgetter(0)):
            self._answered(leg, at)

    def _answered(self, leg: Leg, at: float) -> None:
        status = leg.exchange.status
        if status is None or status >= 300:
            self._drop(leg, at)
            return
        if self._followed or self._group is not None or at >= self._next_group:
            self._learn_prefill(leg, at)
        else:
            self._step_at = at
        self._drop(leg, at)
        self._is_exact = True

    def _learn_prefill(self, leg: Leg, at: float) -> None:
        sent = leg.exchange.started_at
        if at > self._step_at + TOGETHER:
            self._step_at = at
            self._begin_group(sent, at)
        group = self._group
        if group is not None:
            group.tokens += leg.tokens
            group.pairs += leg.pairs
        if leg.expected is not None:
            if not leg.is_guess:
                self._fleet.judge(leg.expected, at - sent)
            if leg.guess is not None:
                self.beside.take(leg.guess, at - sent)
                self._has_learnt()
            self._count_running(at)
            leg.answered_at, leg.running, leg.prefilled = at, self._running_sum, self._prefilled

    def _begin_group(self, sent: float, at: float) -> None:
        """The one before it is complete."""
        if self._group is not None:
            self.rates.take(self._group)
            self._group = None
            self._has_learnt()
        since, steps = self._since, self.step
        if sent > since and self._running:
            steps += RESIDUE * steps
        start = max(since, sent)
        self._prefilled += self._share * max(0.0, at - start - steps)
        if at >= self._next_group and self._is_exact:
            self._next_group = self._after_lesson(at)
            self._group = Group(start, at, steps)

    def _after_lesson(self, now: float) -> float:
        """When the next is wanted."""
        self._lessons += 1
        if self._lessons <= FIRST_LESSONS:
            return now
        return now + max(LEAST_LESSON_SECONDS, self._share * LESSON_SECONDS)

    def _drop(self, leg: Leg, at: float) -> None:
        """It waits no more; if it was the first, the pod turned to the next one then."""
        legs = self.legs
        leg.waits = False
        if legs[0] is leg:
            legs.popleft()
            if at > self._since:
                self._since = at
        else:
            legs.remove(leg)
        self._tokens = self._tokens - leg.tokens if legs else 0.0
        self._pairs = self._pairs - leg.pairs if legs else 0.0

    def _learn(self, leg: Leg, expected: float, now: float) -> None:
        """From a whole answer. One that was not streamed says only how long all of it took."""
        exchange, usage, rates = leg.exchange, leg.exchange.usage, self.rates
        tokens = usage.completion_tokens if usage is not None else exchange.chunks
        if leg.stage is not Stage.WHOLE:
            self._learn_stage(leg, tokens, now)
        elif leg.answered_at is not None:
            self._fleet.answered(leg.tokens, tokens)
            seconds = (exchange.last_byte_at or now) - leg.answered_at
            if tokens > 1 and seconds > 0.0:
                self._count_running(now)
                running = (self._running_sum - leg.running) / (now - leg.answered_at)
                rates.answer(running, max(0.0, seconds - self._prefilled + leg.prefilled) / (tokens - 1))
                self._has_learnt()
        elif usage is not None and not leg.shows:
            self._fleet.answered(leg.tokens, tokens)
            whole = expected / rates.speed + max(0, tokens - 1) * (self.step + rates.per_running)
            rates.hurry(whole, now - exchange.started_at)
            self._has_learnt()

    def _learn_stage(self, leg: Leg, tokens: int, now: float) -> None:
        """Of an answer to what another pod computed only its pace, of a prompt for another pod only its size."""
        fleet = self._fleet
        if leg.stage is not Stage.DECODE:
            fleet.answered(leg.tokens, fleet.output)
            return
        fleet.answered(fleet.prompt, tokens)
        self._count_running(now)
        seen = pace_of(leg, tokens, now, self._running_sum, self._prefilled)
        if seen is not None:
            self.rates.answer(*seen)
            self._has_learnt()

    def _count_running(self, now: float) -> None:
        if now > self._running_at:
            self._running_sum += self._running * (now - self._running_at)
            self._running_at = now

    def _publish_pace(self, running: int, now: float) -> None:
        """What depends on how many run, and on what was learnt."""
        self._count_running(now)
        self._running, self._is_paced = running, True
        rates = self.rates
        self.step = step = rates.step + rates.per_running * running
        self.tpot = step + rates.per_running
        self._in_turn = self.own = (rates.fixed + rates.speed * step, rates.per_token, rates.per_pair)
        self._share = self.beside.share
        self.beside.see(running)
        self._publish_cost(1.0)

    def _publish_cost(self, share: float) -> None:
        """Where prompts are computed in turn, as `share` says, answers stand still meanwhile."""
        (work, decode), (fixed, per_token, per_pair), running = self._prices, self.own, self._running
        delayed = 1.0 + work + share * decode * running
        answer = decode * self._fleet.output
        base = delayed * fixed + answer * (self.step + self.rates.per_running * (1 + running))
        self.cost = (base, delayed * per_token, delayed * per_pair)
