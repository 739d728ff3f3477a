"""A model of one pod: a queue of prompts that are computed in turn, and answers that go on side by side.

That is one of two forms; `Beside` is the other, and says how much of the truth this one is. Where prompts wait for each
other, the time between two first tokens, or from an idle pod's request to its first token, is what the prompts answered
then have cost: engine steps, and what `Rates` makes of tokens and pairs of tokens. The tokens are those that were
thought to be uncached, as they are when a prediction is wanted. The time between the tokens of an answer, less what
prompts took of it, depends on how many run. Both are learnt.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from operator import itemgetter

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.latency.fading import TURN_SECONDS
from proxy.latency.fleet import FleetModel
from proxy.latency.lessons import LEAST_OBSERVED, RESIDUE, TaughtPod
from proxy.latency.pace import Prices
from proxy.latency.published import seconds
from proxy.latency.staged import StagedLegs, waiting
from proxy.latency.work import Leg

COARSE = 2
"""What so many running requests more or fewer change is worth publishing: one costs less than pods may differ."""

PATIENCE = 0.5
"""A first token that is overdue is expected after this share of the time it is overdue for."""

BEHIND = 2.0
"""For each prompt in line so many more come before the line has gone."""

MIXED_SECONDS = 0.05
"""For so long holds what is published of a pod that is not quite of one form."""


class PodModel(TaughtPod):
    """Lives as long as the pod's memory. A pod that has changed must catch up before it is scored."""

    __slots__ = ("_due", "_line", "_others", "_pairs", "_scrape", "_staged", "_strange_tokens", "_tokens")

    def __init__(self, endpoint: Endpoint, fleet: FleetModel, prices: Prices, now: float) -> None:
        super().__init__(fleet, prices, now)
        self.endpoint = endpoint
        self._staged = StagedLegs()
        self._tokens = self._pairs = 0.0
        self._strange_tokens = self._others = 0.0
        """Of prompts that strangers wait for there; and that siblings do as well, as it was published."""
        self._due = now
        """When the first in line should be answered, if prompts are computed in turn."""
        self._line = 0.0
        """Seconds until a prompt's turn, where what is published is not that."""
        self._compare(endpoint.metrics)
        self.catch_up(now)

    def dispatch(self, attempt: Attempt, uncached: float, prompt: float, now: float) -> Leg:
        """Publishes by itself what changes: the request is in the next forecast."""
        leg = Leg(attempt, uncached, prompt)
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

    def dispatch_stage(self, attempt: Attempt, uncached: float, prompt: float, now: float) -> Leg:
        """Of a leg that is not for a whole request. A prompt that another pod answers is in line as any; who answers
        one that another pod computes is in nobody's way, and says how fast answers go."""
        if attempt.stage is Stage.DECODE:
            leg = Leg(attempt, 0.0, prompt)
            leg.waits = False
            if now >= self._next_leg:
                self._next_leg = self._after_lesson(now)
                self._followed += 1
                self._count_running(now)
                leg.expected, leg.running, leg.prefilled = 0.0, self._running_sum, self._prefilled
        else:
            leg = self.dispatch(attempt, uncached, prompt, now)
            leg.shows = True
            if self.legs[0] is leg:
                self.look_at, self.patience = inf, -PATIENCE
        leg.stage = attempt.stage
        self._staged.add(leg)
        return leg

    def delay(self, uncached: float, prompt: float) -> float:
        """Seconds by which others are answered later, all together, for a prompt. In turn with it, each answer stands
        still for what it takes beyond the step that is made anyway. Answers that will begin when another pod has
        computed their prompt count with those that run: most begin before this one would be computed. No scrape shows
        them. Who comes later waits behind it for as long as there is a line."""
        queued, running, _ = self.endpoint.view
        there = max(queued + running, self.endpoint.load.requests)
        answers = max(0, there - len(self.legs) - self._staged.kept())
        return self.work(uncached, prompt) * (answers + BEHIND * len(self.legs))

    def work(self, uncached: float, prompt: float) -> float:
        """Seconds for which the pod does nothing but the prompt."""
        fixed, per_token, per_pair = self._in_turn
        work = fixed - self.step + uncached * (per_token + per_pair * (2.0 * prompt - uncached))
        share = 1.0 if self._share == 1.0 else self.beside.share_with(len(self.legs))
        return share * max(0.0, work)

    def _foretell(self, leg: Leg, prompt: float, now: float) -> None:
        if self.view is None:
            self.catch_up(now)
        beside = self.beside
        if self._share == 1.0:
            beside.see(self._running)
        leg.expected = seconds(self, leg.tokens, prompt, now)
        in_turn = leg.expected
        if self._share < 1.0:
            fixed, per_token, per_pair = self._in_turn
            in_turn = self._line + fixed + leg.tokens * per_token + leg.pairs * per_pair
        leg.guess = beside.guess(in_turn, leg.tokens, self.endpoint.view, self.legs, self._others)
        leg.is_guess = self.rates.prefill.observed < LEAST_OBSERVED
        self._followed += 1

    def catch_up(self, now: float) -> None:
        """With all that has come since; publishes what is read until the next change."""
        endpoint, legs = self.endpoint, self.legs
        if self._scrape is not endpoint.metrics:
            self._compare(endpoint.metrics)
        if legs:
            self._take_answers(now)
        self.view = view = endpoint.view
        queued, running, _ = view
        running += queued - len(legs)
        if not -COARSE < running - self._running < COARSE or not self._is_paced:
            self._publish_pace(max(0, running), now)
        _, per_token, per_pair = self._in_turn
        self._others = ahead = self._strange_tokens + endpoint.load.remote_tokens
        if legs:
            self.rest = (ahead + self._tokens) * per_token + self._pairs * per_pair
            self._turn_to(legs[0])
        else:
            self.rest = ahead * per_token + (RESIDUE * self.step if running > 0 else 0.0)
            self.head, self.patience, self.due = None, 0.0, 0.0
            self.look_at = now + TURN_SECONDS  # a pod that nobody asks changes by fading only, and not its view
        if self._share < 1.0:
            self._mix(now)

    def _mix(self, now: float) -> None:
        """Publish what comes of both forms, for a while: what is in turn passes with time."""
        beside, left = self.beside, self.due - now
        self._line = line = self.rest + (left if left > 0.0 else left * self.patience)
        share = beside.share_with(len(self.legs))
        other = 1.0 - share
        wait, per_token = beside.wait(self.endpoint.view, self.legs, self._others)
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
        self.head = first.attempt
        self.look_at, self.patience = (inf, -PATIENCE) if first.shows else (due, 0.0)

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
            if leg.attempt.succeeded:
                self._learn(leg, leg.expected, now)

    def _compare(self, scrape: Metrics) -> None:
        """Who waits there without having been sent by us, or siblings, waits before the next: others' requests, and
        sequences that were pre-empted."""
        self._scrape = scrape
        self._fade(scrape.scraped_at)
        self.rates.hold(scrape.kv_usage * scrape.blocks * scrape.block_size)
        self._has_learnt()
        self.beside.look(scrape)
        self._strange_tokens = 0.0
        known = scrape.freshness is Freshness.FRESH and not self.endpoint.load.remote_requests
        if known and scrape.waiting:
            ours = waiting(chain(self.legs, self._staged.coming()), scrape.scraped_at)
            self._strange_tokens = max(0, scrape.waiting - ours) * self._fleet.prompt

    def _fade(self, now: float) -> None:
        fading = self.rates.fading
        if self.legs:  # it is at work, however long that takes: nobody avoids it
            fading.is_news = True
        seconds = fading.seconds(now)
        if seconds:
            self.rates.fade(seconds)
            self.beside.fade(seconds)

    def _take_answers(self, now: float) -> None:
        """Of the first in line. What is not streamed gives no sign, and is taken to be in time."""
        legs = self.legs
        if self._share < 1.0:
            self._take_answers_of_all()
        while legs:
            leg = legs[0]
            attempt = leg.attempt
            if not leg.shows:
                if now < self._due:
                    return
                self._drop(leg, self._due)
                self._is_exact = False
                if legs:
                    self._turn_to(legs[0])
            elif attempt.first_byte_at is None:
                return
            else:
                self._answered(leg, attempt.first_byte_at)

    def _take_answers_of_all(self) -> None:
        """In the order in which they came; so they do where prompts are computed side by side."""
        came = [(leg.attempt.first_byte_at, leg) for leg in self.legs if leg.shows]
        answered = [(at, leg) for at, leg in came if at is not None]
        for at, leg in sorted(answered, key=itemgetter(0)):
            self._answered(leg, at)

    def _answered(self, leg: Leg, at: float) -> None:
        status = leg.attempt.status
        if status is None or status >= 300:
            self._drop(leg, at)
            return
        if self._followed or self._group is not None or at >= self._next_group:
            self._learn_prefill(leg, at)
        else:
            self._step_at = at
        self._drop(leg, at)
        self._is_exact = True

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
