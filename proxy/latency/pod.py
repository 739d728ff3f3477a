"""The model of one pod: a queue of prompts that are computed in turn, and responses that run side by side.

The time between two first tokens, or from a request to an idle pod to its first token, is what the prompts computed
then have taken: engine steps, and what `Rates` makes of uncached tokens and pairs of tokens. The time between the
tokens of a response, less what prompts took of it, depends on how many run. Both are learnt. Where an engine does not
compute prompts in turn, `Sharing` predicts beside it, and the fleet knows how much of the truth is which.

A decision reads attributes that change seldom: `rest`, `due`, `patience`, `own`, `cost`, `tpot` (see `costs` below).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf
from operator import itemgetter
from typing import NamedTuple

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint, Freshness, LoadView, Metrics
from proxy.latency.lockstep import WORK_PRICE, WORK_SECONDS, Lockstep
from proxy.latency.rates import FADE_INTERVAL, FleetModel, Rates
from proxy.latency.sharing import Forms, Sharing

COARSE = 2
"""A change of the running requests by this many is published; a smaller one costs less than pods may differ."""

PATIENCE = 0.5
"""A first token that is overdue is expected after this share of the time for which it is overdue."""

BEHIND = 2.0
"""Further prompts that are taken to come for each one in the queue, before the queue is empty."""

MIXED_SECONDS = 0.05
"""How long published values are valid on a pod that does not quite compute prompts in turn."""

TOGETHER = 0.003
"""First tokens that come within this many seconds came out of the same engine step."""

RESIDUE = 0.5
"""Share that is left of the step under way when a request comes."""

LEAST_OBSERVED = 8
"""Prompts that a pod must have computed before its predictions are compared with observations."""

LESSON_SECONDS, FIRST_LESSONS = 0.33, 16
"""After the first lessons a pod is learnt from at this interval: more lessons say little that is new, and a lesson
is slow (hot path, see docs/notes/cpu.md)."""

LEAST_LESSON_SECONDS = 0.05
"""The interval for a pod that shares itself among prompts, where chance hides more."""

Terms = tuple[float, float, float]
"""Seconds: of any prompt, of an uncached token, and of a pair of tokens, where every pair counts twice."""
NO_TERMS: Terms = (0.0, 0.0, 0.0)


class Prices(NamedTuple):
    """What a choice costs others, in seconds before a first token: a second of the pod's work on a prompt, for requests
    that come later, and a second of delay of a response that runs, this one or another."""

    work: float
    decode: float


@dataclass(slots=True, eq=False)
class Work:
    """The work of one attempt. `tokens` are the uncached tokens of the prompt as far as known, `pairs` the tokens that
    they attend to: each to all before it, counted twice."""

    attempt: Attempt
    tokens: float
    pairs: float
    shows: bool
    """The first byte comes when the prompt is computed, not when the response is complete."""
    stage: Stage = Stage.WHOLE
    """As it was when the attempt began."""
    is_queued: bool = True
    """It has no first token yet."""
    expected: float | None = None
    """The predicted time to first token in seconds; None: nothing is learnt from this attempt."""
    forms: Forms | None = None
    is_guess: bool = False
    """Too little was known for the prediction to be compared with the observation."""
    first_token_at: float | None = None
    """When the first token came; None where that was not observed."""
    running: float = 0.0
    prefilled: float = 0.0
    """The pod's integral of running requests, and its seconds of prefill, at that time."""


@dataclass(slots=True)
class _Group:
    """Prompts whose first tokens came out of one engine step; see `Rates.observe_prefill`."""

    seconds: float
    steps: float
    tokens: float = 0.0
    pairs: float = 0.0


@dataclass(slots=True, eq=False)  # slots: of more than thirty attributes each takes a third more to read without them
class PodModel:
    """Lives as long as the pod's memory. When the pod has changed, `catch_up` must run before the pod is scored."""

    endpoint: Endpoint
    _fleet: FleetModel
    prices: Prices
    _since: float
    """When the pod began with the first in the queue; at first the time of construction."""
    lockstep: Lockstep | None = None
    """Shared with the models of the pod's other data-parallel ranks; None for a pod without ranks."""
    rates: Rates = field(init=False)
    sharing: Sharing = field(init=False)
    queue: deque[Work] = field(default_factory=deque)
    """Prompts without a first token, in the order in which they were sent."""

    view: LoadView | None = None
    """The view that all published values were made with; None if more has changed."""
    head: Attempt | None = None
    """The first in the queue."""
    due: float = 0.0
    """When its first token is expected."""
    patience: float = 0.0
    """Seconds of further wait per second that it is overdue; negated, because it multiplies a negative time left."""
    valid_until: float = 0.0
    """When to catch up even if nothing has come from the pod."""
    rest: float = 0.0
    """Seconds of work behind the first in the queue."""
    own: Terms = NO_TERMS
    """What a prompt takes once the pod turns to it."""
    cost: Terms = NO_TERMS
    """The same, and what it costs others."""
    step: float = 0.0
    """Seconds per token of the responses that run."""
    tpot: float = 0.0
    """Seconds per token of one more response."""

    _terms: Terms = NO_TERMS
    """`own`, if prompts are computed in turn."""
    _in_turn: float = 1.0
    """`FleetModel.in_turn`, as published."""
    _line: float = 0.0
    """Seconds until a prompt's turn, where the published values mix both models."""
    _tokens: float = 0.0
    _pairs: float = 0.0
    """Of the queue."""
    _staged: list[Work] = field(default_factory=list)
    """Attempts that are one stage of a request which several pods serve."""
    _scrape: Metrics | None = None
    _strange_tokens: float = 0.0
    """Prompt tokens of other clients in the pod's queue."""
    _others: float = 0.0
    """The same with the tokens of sibling proxies, as published."""
    _due: float = 0.0
    """When the first token of the first in the queue is expected, if prompts are computed in turn."""
    _is_exact: bool = True
    """`_since` was observed, not predicted."""
    _is_paced: bool = False
    """What depends on the running requests is published."""
    running: int = 0
    _running_at: float = field(init=False)
    _running_sum: float = 0.0
    """Integral of the running requests over time."""
    _prefilled: float = 0.0
    """Seconds of prefill, in sum."""
    _group: _Group | None = None
    """What is learnt from next."""
    _step_at: float = -inf
    """When the engine step ended that gave the last first token."""
    _followed: int = 0
    """Attempts under way that something is to be learnt from."""
    _lessons: int = 0
    _next_group: float = field(init=False)
    _next_work: float = field(init=False)
    _worked: float = 0.0
    _worked_at: float = 0.0
    """The work on prompts as of then, see `worked`; for ranks only."""

    def __post_init__(self) -> None:
        self.rates = Rates(self._fleet) if self.lockstep is None else self.lockstep.rates
        self.sharing = Sharing(self._fleet, self.rates)
        self._running_at = self._next_group = self._next_work = self._since
        if self.lockstep is not None:
            self.lockstep.models.append(self)
        self.catch_up(self._since)

    def wait(self, now: float) -> float:
        """Return the seconds of prefill that a prompt waits for, as published."""
        return self.rest + max(0.0, self.due - now) if self.due else self.rest

    def worked(self, now: float) -> float:
        """Return the recent seconds of work on prompts of a rank: older work counts for less, see `WORK_SECONDS`."""
        return self._worked * exp((self._worked_at - now) / WORK_SECONDS)

    def set_prices(self, prices: Prices) -> None:
        self.prices = prices
        self._invalidate()

    def refresh(self) -> None:
        """Read the fleet's coefficients again."""
        self.rates.refresh()
        self._invalidate()

    def dispatch(self, attempt: Attempt, uncached: float, prompt: float, now: float) -> Work:
        """Add a request to the queue and publish what changes, so that the next forecast has it."""
        work = Work(attempt, uncached, uncached * (2.0 * prompt - uncached), attempt.request.stream)
        if now >= self._next_work:
            self._next_work = self._after_lesson(now)
            self._predict(work, prompt, now)
        queue, pairs, (_, per_token, per_pair) = self.queue, work.pairs, self._terms
        queue.append(work)
        self._tokens += uncached
        self._pairs += pairs
        self.rest += (prefill := uncached * per_token + pairs * per_pair)
        if self.lockstep is not None:
            self._worked, self._worked_at = self.worked(now) + prefill, now
        if len(queue) == 1:
            self._since, self._is_exact = now, True
            self._publish_first(work)
        if self._scrape is self.endpoint.metrics:
            self.view = self.endpoint.view if self._in_turn == 1.0 else None
        return work

    def dispatch_stage(self, attempt: Attempt, uncached: float, prompt: float, now: float) -> Work:
        """Add one stage of a request. A prefill stage is queued like any prompt. A decode stage keeps no prompt
        waiting, and shows how fast responses run."""
        if attempt.stage is Stage.DECODE:
            work = Work(attempt, 0.0, 0.0, attempt.request.stream, is_queued=False)
            if now >= self._next_work:
                self._next_work = self._after_lesson(now)
                self._followed += 1
                self._count_running(now)
                work.expected, work.running, work.prefilled = 0.0, self._running_sum, self._prefilled
        else:
            work = self.dispatch(attempt, uncached, prompt, now)
            work.shows = True
            if self.queue[0] is work:
                self.valid_until, self.patience = inf, -PATIENCE
        work.stage = attempt.stage
        self._staged = [*self._open_stages(), work]
        return work

    def end(self, work: Work, now: float) -> None:
        """End an attempt, however it ended. The next `catch_up` publishes what follows."""
        if work.is_queued:
            if work.shows:
                self._dequeue(now)
                if work.is_queued:
                    self._drop(work, now)
            else:
                self._drop(work, min(now, self._due))
                self._is_exact = False
        if work.expected is not None:
            self._followed -= 1
            if work.attempt.succeeded:
                self._learn_response(work, work.expected, now)

    def delay(self, uncached: float, prompt: float) -> float:
        """Return the seconds by which other responses are delayed by a prompt, all together.

        Each response stands still for what the prompt takes beyond the step that is made anyway. A response that waits
        for another pod to compute its prompt counts: most of these begin before this prompt would be computed, and no
        scrape shows them. Requests that come later wait behind the prompt while there is a queue."""
        queued, running, _ = self.endpoint.view
        there = max(queued + running, self.endpoint.load.requests)
        computed = sum(work.stage is not Stage.DECODE and not work.is_queued for work in self._open_stages())
        responses = max(0, there - len(self.queue) - computed)
        elsewhere = 0.0 if self.lockstep is None else self.lockstep.elsewhere(self)
        return self.work(uncached, prompt) * (responses + elsewhere + BEHIND * len(self.queue))

    def work(self, uncached: float, prompt: float) -> float:
        """Return the seconds for which the pod does nothing but this prompt."""
        fixed, per_token, per_pair = self._terms
        work = fixed - self.step + uncached * (per_token + per_pair * (2.0 * prompt - uncached))
        share = 1.0 if self._in_turn == 1.0 else self._fleet.in_turn_of(len(self.queue))
        return share * max(0.0, work)

    def catch_up(self, now: float) -> None:
        """Take in all that has happened since the last call, and publish what is read until the next change."""
        endpoint, queue = self.endpoint, self.queue
        if self._scrape is not endpoint.metrics:
            self._read_scrape(endpoint.metrics)
        if queue:
            self._dequeue(now)
        self.view = view = endpoint.view
        queued, running, _ = view
        running += queued - len(queue)
        if not -COARSE < running - self.running < COARSE or not self._is_paced:
            self._publish_pace(max(0, running), now)
        _, per_token, per_pair = self._terms
        self._others = ahead = self._strange_tokens + endpoint.load.remote_tokens
        if queue:
            self.rest = (ahead + self._tokens) * per_token + self._pairs * per_pair
            self._publish_first(queue[0])
        else:
            self.rest = ahead * per_token + (RESIDUE * self.step if running > 0 else 0.0)
            self.head, self.patience, self.due = None, 0.0, 0.0
            self.valid_until = now + FADE_INTERVAL  # an unused pod changes by fading, which its view does not show
        if self._in_turn < 1.0:
            self._publish_mixed(now)

    def _invalidate(self) -> None:
        self._is_paced, self.view = False, None

    def _publish_pace(self, running: int, now: float) -> None:
        """Publish what depends on the running requests and on the coefficients."""
        self._count_running(now)
        self.running, self._is_paced = running, True
        rates = self.rates
        self.step = step = rates.step + rates.per_running * running
        self.tpot = step + rates.per_running
        self._terms = self.own = (rates.fixed + rates.slowness * step, rates.per_token, rates.per_pair)
        self._in_turn = in_turn = self._fleet.in_turn
        if in_turn < 1.0:  # otherwise lessons alone read it
            self.sharing.refresh(running)
        self._publish_cost(1.0)

    def _publish_cost(self, in_turn: float) -> None:
        """Where prompts are computed in turn, responses stand still meanwhile. What ranks that step together cost each
        other is for `charge_lockstep`."""
        (work, decode), (fixed, per_token, per_pair), running = self.prices, self.own, self.running
        standing = running if self.lockstep is None else running * (1.0 - self.lockstep.share)
        delayed = 1.0 + work + in_turn * decode * standing
        response = decode * self._fleet.output
        base = delayed * fixed + response * (self.step + self.rates.per_running * (1 + running))
        self.cost = (base, delayed * per_token, delayed * per_pair)

    def _publish_first(self, first: Work) -> None:
        """Take the first in the queue out of `rest`: `due` has it."""
        fixed, per_token, per_pair = self._terms
        seconds = first.tokens * per_token + first.pairs * per_pair
        self.rest -= seconds
        self.due = self._due = due = self._since + fixed + seconds
        self.head = first.attempt
        self.valid_until, self.patience = (inf, -PATIENCE) if first.shows else (due, 0.0)

    def _publish_mixed(self, now: float) -> None:
        """Publish the mean of both models, by the fleet's share, for a short time: prompts in turn progress."""
        sharing, left, in_turn = self.sharing, self.due - now, self._fleet.in_turn_of(len(self.queue))
        self._line = line = self.rest + (left if left > 0.0 else left * self.patience)
        shared = 1.0 - in_turn
        ahead, longer = sharing.ahead(self._queue_tokens(), self._others)
        self.rest = in_turn * line + shared * (sharing.wait(self.endpoint.view) + sharing.per_ahead * ahead)
        self.due = self.patience = 0.0
        self.valid_until = now + MIXED_SECONDS
        fixed, per_token, per_pair = self._terms
        own = shared * (sharing.per_token + sharing.per_ahead * longer)
        self.own = (in_turn * fixed + shared * sharing.fixed, in_turn * per_token + own, in_turn * per_pair)
        self._publish_cost(in_turn)

    def _read_scrape(self, scrape: Metrics) -> None:
        """Requests that wait there, but were sent by neither this proxy nor its siblings, wait before the next prompt:
        requests of other clients, and sequences that were preempted."""
        self._scrape = scrape
        self._fade(scrape.scraped_at)
        if self.lockstep is not None:
            self.lockstep.scraped(scrape)
        else:
            self.rates.set_cached(scrape.cached_tokens)
        self.sharing.read_scrape(scrape)
        self._invalidate()
        self._strange_tokens = 0.0
        if scrape.freshness is Freshness.FRESH and not self.endpoint.load.remote_requests and scrape.waiting:
            strangers = scrape.waiting - self._waiting_at(scrape.scraped_at)
            self._strange_tokens = max(0, strangers) * self._fleet.prompt

    def _waiting_at(self, at: float) -> int:
        """Count the attempts of this proxy that waited for their first token then."""
        decoding = [work for work in self._open_stages() if work.stage is Stage.DECODE]
        begun = (work.attempt for work in (*self.queue, *decoding) if work.attempt.started_at <= at)
        return sum(attempt.first_byte_at is None or attempt.first_byte_at > at for attempt in begun)

    def _fade(self, now: float) -> None:
        fading = self.rates.fading
        if self.queue:  # it is in use, however long that takes
            fading.is_news = True
        seconds = fading.seconds(now)
        if seconds:
            self.rates.fade(seconds)

    def _dequeue(self, now: float) -> None:
        """Take first tokens out of the queue. A response that does not stream gives no sign, and is taken to be in
        time."""
        queue = self.queue
        if self._in_turn < 1.0:  # in any order
            times = [(work.attempt.first_byte_at, work) for work in queue if work.shows]
            for at, work in sorted(((at, work) for at, work in times if at is not None), key=itemgetter(0)):
                self._first_token_came(work, at)
        while queue:
            first = queue[0]
            attempt = first.attempt
            if not first.shows:
                if now < self._due:
                    return
                self._drop(first, self._due)
                self._is_exact = False
                if queue:
                    self._publish_first(queue[0])
            elif attempt.first_byte_at is None:
                return
            else:
                self._first_token_came(first, attempt.first_byte_at)

    def _first_token_came(self, work: Work, at: float) -> None:
        status = work.attempt.status
        if status is None or status >= 300:
            self._drop(work, at)
            return
        if self._followed or self._group is not None or at >= self._next_group:
            self._learn_first_token(work, at)
        else:
            self._step_at = at
        self._drop(work, at)
        self._is_exact = True

    def _drop(self, work: Work, at: float) -> None:
        """Take it out of the queue. If it was the first, the pod turned to the next one then."""
        queue = self.queue
        work.is_queued = False
        if queue[0] is work:
            queue.popleft()
            if at > self._since:
                self._since = at
        else:
            queue.remove(work)
        self._tokens = self._tokens - work.tokens if queue else 0.0
        self._pairs = self._pairs - work.pairs if queue else 0.0

    def _predict(self, work: Work, prompt: float, now: float) -> None:
        """Note the predictions of both models, to learn from the observation."""
        if self.view is None:
            self.catch_up(now)
        in_turn = work.expected = seconds(self, work.tokens, prompt, now)
        if self._in_turn == 1.0:
            self.sharing.refresh(self.running)
        else:
            fixed, per_token, per_pair = self._terms
            in_turn = self._line + fixed + work.tokens * per_token + work.pairs * per_pair
        queue, view = list(self._queue_tokens()), self.endpoint.view
        work.forms = self.sharing.predict(in_turn, work.tokens, queue, self._others, view)
        work.is_guess = self.rates.prefill.observed < LEAST_OBSERVED
        self._followed += 1

    def _learn_first_token(self, work: Work, at: float) -> None:
        sent = work.attempt.started_at
        if at > self._step_at + TOGETHER:
            self._step_at = at
            self._start_group(sent, at)
        group = self._group
        if group is not None:
            group.tokens += work.tokens
            group.pairs += work.pairs
        if work.expected is not None:
            if not work.is_guess:
                self._fleet.judge(work.expected, at - sent)
            if work.forms is not None:
                self.sharing.observe(work.forms, at - sent)
                self._invalidate()
            self._count_running(at)
            work.first_token_at, work.running, work.prefilled = at, self._running_sum, self._prefilled

    def _start_group(self, sent: float, at: float) -> None:
        """Learn from the group before, which is complete now."""
        group, self._group = self._group, None
        if group is not None:
            self.rates.observe_prefill(group.seconds, group.steps, group.tokens, group.pairs)
            self._invalidate()
        since, steps = self._since, self.step
        if sent > since and self.running:
            steps += RESIDUE * steps
        seconds = at - max(since, sent)
        self._prefilled += self._in_turn * max(0.0, seconds - steps)
        if at >= self._next_group and self._is_exact:
            self._next_group = self._after_lesson(at)
            self._group = _Group(seconds, steps)

    def _learn_response(self, work: Work, expected: float, now: float) -> None:
        """Learn from a complete response. One that was not streamed shows only how long all of it took."""
        attempt, usage, rates, fleet = work.attempt, work.attempt.usage, self.rates, self._fleet
        tokens = usage.completion_tokens if usage is not None else attempt.chunks
        if work.stage is Stage.DECODE:
            fleet.observe_sizes(fleet.prompt, tokens)
            self._learn_pace(work, attempt.first_byte_at, attempt.started_at, tokens, now)
        elif work.stage is not Stage.WHOLE:
            fleet.observe_sizes(work.tokens, fleet.output)
        elif work.first_token_at is not None:
            fleet.observe_sizes(work.tokens, tokens)
            self._learn_pace(work, work.first_token_at, work.first_token_at, tokens, now)
        elif usage is not None and not work.shows:
            fleet.observe_sizes(work.tokens, tokens)
            whole = expected / rates.slowness + max(0, tokens - 1) * (self.step + rates.per_running)
            rates.observe_slowness(whole, now - attempt.started_at)
            self._invalidate()

    def _learn_pace(self, work: Work, first: float | None, counted: float, tokens: int, now: float) -> None:
        """Learn the seconds per token, without what prompts took of them. The running requests and the seconds of
        prefill are known since `counted`, and taken to be spread evenly."""
        if first is None or tokens < 2 or not work.attempt.request.stream:
            return
        response, whole = (work.attempt.last_byte_at or now) - first, now - counted
        if response <= 0.0 or whole <= 0.0:
            return
        self._count_running(now)
        held_up = (self._prefilled - work.prefilled) * min(1.0, response / whole)
        pace = max(0.0, response - held_up) / (tokens - 1)
        self.rates.observe_decode((self._running_sum - work.running) / whole, pace)
        self._invalidate()

    def _after_lesson(self, now: float) -> float:
        """Return when the next lesson is wanted."""
        self._lessons += 1
        if self._lessons <= FIRST_LESSONS:
            return now
        return now + max(LEAST_LESSON_SECONDS, self._in_turn * LESSON_SECONDS)

    def _count_running(self, now: float) -> None:
        if now > self._running_at:
            self._running_sum += self.running * (now - self._running_at)
            self._running_at = now

    def _queue_tokens(self) -> Iterator[float]:
        """Yield the uncached tokens of prompts without a first token, wherever in the queue."""
        return (work.tokens for work in self.queue if work.attempt.first_byte_at is None)

    def _open_stages(self) -> list[Work]:
        self._staged = [work for work in self._staged if work.attempt.ending is None]
        return self._staged


def seconds(pod: PodModel, uncached: float, prompt: float, now: float) -> float:
    """Return the time to first token of a prompt with so many uncached tokens, by the terms of `own`: rest + wait +
    fixed + tokens * (per_token + per_pair * (2 * prompt - tokens)), where wait is the time left until `due`, or a share
    of the time overdue."""
    fixed, per_token, per_pair = pod.own
    left = pod.due - now
    if left < 0.0:
        left *= pod.patience
    return pod.rest + left + fixed + uncached * (per_token + per_pair * (2.0 * prompt - uncached))


def catch_up(pods: Sequence[PodModel], now: float) -> None:
    """Let pods catch up where something has happened."""
    for pod in pods:
        head, known, view = pod.head, pod.view, pod.endpoint.view
        # a first token, or another view; a response that does not stream gives no sign but its time
        has_begun = head is not None and head.first_byte_at is not None
        if has_begun or now > pod.valid_until or (known is not view and known != view):
            pod.catch_up(now)


def costs(
    pods: Sequence[PodModel], cold: float, size: float, held: Mapping[Endpoint, int], prompt: float, now: float
) -> list[float]:
    """Return `seconds` on each pod, by the terms of `cost`, once it has caught up. The prompt has `cold` uncached
    tokens where nothing is held, and `size` less for each block that is `held`. Arguments are floats, because
    multiplying with an integer takes twice as long."""
    # One loop, not four: hot path, see docs/notes/cpu.md.
    twice = 2.0 * prompt
    found: list[float] = []
    add = found.append
    for pod in pods:
        endpoint, head, known = pod.endpoint, pod.head, pod.view
        view = endpoint.view
        if (
            (known is not view and known != view)
            or (head is not None and head.first_byte_at is not None)
            or now > pod.valid_until
        ):
            pod.catch_up(now)
        fixed, per_token, per_pair = pod.cost
        tokens = cold - size * held[endpoint] if endpoint in held else cold
        cost = pod.rest + fixed + tokens * (per_token + per_pair * (twice - tokens))
        if due := pod.due:  # 0: nothing is in the queue, or the published values have it
            left = due - now
            cost += left if left > 0.0 else left * pod.patience
        add(cost)
    return found


def charge_lockstep(
    pods: Sequence[PodModel],
    found: list[float],
    cold: float,
    size: float,
    held: Mapping[Endpoint, int],
    prompt: float,
    now: float,
) -> None:
    """Add to the `costs` that were found what a prompt costs the responses on all ranks that step together.

    A step takes as long as on the slowest rank. So a prompt delays them only for the time by which it makes the longest
    queue of all ranks longer: a rank with a shorter queue computes it while the responses stand still anyway. Over
    several seconds the busiest rank sets the pace, so a rank with more recent work than the others costs more."""
    pace: dict[Lockstep, tuple[float, float]] = {}
    for at, pod in enumerate(pods):
        lockstep = pod.lockstep
        if lockstep is None or not lockstep.share:
            continue
        if lockstep not in pace:
            models = lockstep.models
            work = sum(model.worked(now) for model in models)
            pace[lockstep] = max(model.wait(now) for model in models), work / len(models)
        longest, usual = pace[lockstep]
        tokens = cold - size * held.get(pod.endpoint, 0)
        _, per_token, per_pair = pod.own
        work = tokens * (per_token + per_pair * (2.0 * prompt - tokens))
        found[at] += WORK_PRICE * lockstep.share * (pod.worked(now) - usual)
        if (longer := pod.wait(now) + work - longest) > 0.0:
            found[at] += pod.prices.decode * lockstep.share * lockstep.running * longer
