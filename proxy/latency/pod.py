"""The model of one pod: a queue of prompts that are computed in turn, and responses that run side by side.

The time between two first tokens, or from the arrival at an idle pod to the first token, is the prefill time of the
prompts computed in it: engine steps, and the time that `Rates` predicts for uncached tokens and pairs of tokens. The
time between the tokens of a response, without the prefill time in it, depends on the number of running requests. Both
are learned. For engines that do not compute prompts in turn, `Sharing` makes a second prediction, and the fleet model
has the weight of each.

A decision reads attributes that change rarely: `rest`, `due`, `overdue_factor`, `own`, `cost`, `tpot` (see `costs`
below).
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
from proxy.latency.sharing import Predictions, Sharing

LEAST_CHANGE = 2
"""Smallest change of the number of running requests that is published. A smaller one has no noticeable effect."""

OVERDUE_FACTOR = 0.5
"""An overdue first token is expected after this share of the time by which it is overdue."""

LATER_PER_QUEUED = 2.0
"""Assumed number of later prompts per queued prompt that arrive before the queue is empty."""

MIXED_SECONDS = 0.05
"""Validity in seconds of the published values of a pod that does not always compute prompts in turn."""

SAME_STEP_SECONDS = 0.003
"""First tokens within this many seconds come from the same engine step."""

STEP_REST = 0.5
"""Expected remaining share of the current engine step when a request arrives."""

LEAST_OBSERVED = 8
"""Observed prefills of a pod, one for all prompts of an engine step, before its predictions are compared with
observations."""

OBSERVATION_INTERVAL, FIRST_OBSERVATIONS = 0.33, 16
"""Interval in seconds of the observations of a pod after the first ones. More observations add little, and each is
slow (hot path, see docs/notes/cpu.md)."""

LEAST_OBSERVATION_INTERVAL = 0.05
"""The interval for a pod that shares itself among prompts, whose observations vary more."""

STREAMS_RECENT = 10.0
"""Seconds after an observed first token in which nothing is learned from responses that are not streamed, which show
less."""

SHORTEST_DIVIDED = 0.5
"""Shortest duration in seconds of a response that is not streamed which is divided between prompts and tokens."""

Terms = tuple[float, float, float]
"""Seconds per prompt, per uncached token, and per pair of tokens, where every pair counts twice."""
NO_TERMS: Terms = (0.0, 0.0, 0.0)


class Prices(NamedTuple):
    """The weights of the cost for other requests, relative to a second of this request's time to first token: `work`
    for a second that the pod works on the prompt, which later requests wait for; `decode` for a second of delay of a
    running response."""

    work: float
    decode: float


@dataclass(slots=True, eq=False)
class Work:
    """The work of one attempt. `tokens` are the uncached tokens of the prompt as predicted, `pairs` the pairs of such a
    token and an earlier token, counted twice."""

    attempt: Attempt
    tokens: float
    pairs: float
    shows: bool
    """Whether the first byte shows that the prompt is computed; otherwise the response arrives as a whole."""
    stage: Stage = Stage.WHOLE
    """The stage at the start of the attempt."""
    is_queued: bool = True
    """Whether it has no first token yet."""
    expected: float | None = None
    """The predicted time to first token in seconds; None: nothing is learned from this attempt."""
    predictions: Predictions | None = None
    is_guess: bool = False
    """Whether there were too few observations to count the error of the prediction."""
    first_token_at: float | None = None
    """Time of the first token; None if it was not observed."""
    running: float = 0.0
    prefilled: float = 0.0
    """The pod's integral of running requests, and its seconds of prefill, at that time."""
    computed: tuple[float, float] = (0.0, 0.0)
    """For a response that is not streamed: the tokens and pairs that the pod had computed when it was sent."""


@dataclass(slots=True)
class _Group:
    """Prompts whose first tokens came from one engine step; see `Rates.observe_prefill`."""

    seconds: float
    steps: float
    tokens: float = 0.0
    pairs: float = 0.0


@dataclass(slots=True, eq=False)  # without slots, an attribute of more than thirty takes a third longer to read
class PodModel:
    """The model of one pod, or of one data-parallel rank. After a change of the pod, `catch_up` must run before the pod
    is scored."""

    endpoint: Endpoint
    _fleet: FleetModel
    prices: Prices
    _since: float
    """When the pod started the first prompt of the queue; initially the time of construction."""
    lockstep: Lockstep | None = None
    """Shared with the models of the pod's other data-parallel ranks; None for a pod without ranks."""
    rates: Rates = field(init=False)
    sharing: Sharing = field(init=False)
    queue: deque[Work] = field(default_factory=deque)
    """Prompts without a first token, in the order in which they were sent."""

    view: LoadView | None = None
    """The view from which all published values were computed; None if something else has changed."""
    head: Attempt | None = None
    """The first attempt of the queue."""
    due: float = 0.0
    """When its first token is expected."""
    overdue_factor: float = 0.0
    """Expected seconds until the first token per second that it is overdue; negative, because it is multiplied by a
    negative time."""
    valid_until: float = 0.0
    """When `catch_up` must run even without a change."""
    rest: float = 0.0
    """Seconds of work of the queue after its first prompt."""
    own: Terms = NO_TERMS
    """The duration of a prompt from the time at which the pod starts it."""
    cost: Terms = NO_TERMS
    """`own` plus the cost for other requests."""
    step: float = 0.0
    """Seconds per token of the running responses."""
    tpot: float = 0.0
    """Seconds per token of one more response."""

    _terms: Terms = NO_TERMS
    """`own`, if prompts are computed in turn."""
    _in_turn: float = 1.0
    """`FleetModel.in_turn`, as published."""
    _line: float = 0.0
    """Seconds until the pod starts the prompt if prompts are computed in turn, for a pod with both models."""
    _tokens: float = 0.0
    _pairs: float = 0.0
    """Sums over the queue."""
    _has_ended: bool = False
    """Whether an attempt has ended since the last scrape."""
    _staged: list[Work] = field(default_factory=list)
    """Attempts that are one stage of a request that several pods serve."""
    _scrape: Metrics | None = None
    _foreign_tokens: float = 0.0
    """Prompt tokens of other clients in the pod's queue."""
    _others: float = 0.0
    """The same plus the tokens of other proxies, as published."""
    _due: float = 0.0
    """When the next first token is expected, if prompts are computed in turn."""
    _is_exact: bool = True
    """Whether `_since` was observed, not predicted."""
    _is_paced: bool = False
    """Whether the values that depend on the running requests are up to date."""
    running: int = 0
    _running_at: float = field(init=False)
    _running_sum: float = 0.0
    """Integral of the running requests over time."""
    _prefilled: float = 0.0
    """Sum of the seconds of prefill."""
    _computed_tokens: float = 0.0
    _computed_pairs: float = 0.0
    """Sums over all prompts that have left the queue."""
    _group: _Group | None = None
    """The next observation."""
    _step_at: float = -inf
    """End of the engine step with the last first token."""
    _followed: int = 0
    """Running attempts that will be observed."""
    _observations: int = 0
    _next_group: float = field(init=False)
    _next_followed: float = field(init=False)
    _worked: float = 0.0
    _worked_at: float = 0.0
    """The work on prompts at that time, see `worked`; for ranks only."""

    def __post_init__(self) -> None:
        self.rates = self._fleet.rates_of(self.endpoint) if self.lockstep is None else self.lockstep.rates
        self.sharing = Sharing(self._fleet, self.rates)
        self._running_at = self._next_group = self._next_followed = self._since
        if self.lockstep is not None:
            self.lockstep.models.append(self)
        self.catch_up(self._since)

    def wait(self, now: float) -> float:
        """Return the seconds of prefill before a new prompt, from the published values."""
        return self.rest + max(0.0, self.due - now) if self.due else self.rest

    def worked(self, now: float) -> float:
        """Return the recent seconds of work of a rank on prompts; older work has less weight, see `WORK_SECONDS`."""
        return self._worked * exp((self._worked_at - now) / WORK_SECONDS)

    def set_prices(self, prices: Prices) -> None:
        self.prices = prices
        self._invalidate()

    def refresh(self) -> None:
        """Read the fleet's coefficients again."""
        self.rates.refresh()
        self._invalidate()

    def dispatch(self, attempt: Attempt, uncached: float, prompt: float, now: float) -> Work:
        """Add a request to the queue, and publish the changed values for the next forecast."""
        work = Work(attempt, uncached, uncached * (2.0 * prompt - uncached), attempt.request.stream)
        if now >= self._next_followed:
            self._next_followed = self._after_observation(now)
            self._predict(work, prompt, now)
            if not work.shows:
                self._count_running(now)
                work.running, work.computed = self._running_sum, (self._computed_tokens, self._computed_pairs)
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
            self.view = self.endpoint.view if self._in_turn == 1.0 and self.sharing.slots == inf else None
        return work

    def dispatch_stage(self, attempt: Attempt, uncached: float, prompt: float, now: float) -> Work:
        """Add one stage of a request. A prefill stage is queued like any prompt. A decode stage delays no prompt, and
        shows the speed of responses."""
        if attempt.stage is Stage.DECODE:
            work = Work(attempt, 0.0, 0.0, attempt.request.stream, is_queued=False)
            if now >= self._next_followed:
                self._next_followed = self._after_observation(now)
                self._followed += 1
                self._count_running(now)
                work.expected, work.running, work.prefilled = 0.0, self._running_sum, self._prefilled
        else:
            work = self.dispatch(attempt, uncached, prompt, now)
            work.shows = True
            if self.queue[0] is work:
                self.valid_until, self.overdue_factor = inf, -OVERDUE_FACTOR
        work.stage = attempt.stage
        self._staged = [*self._open_stages(), work]
        return work

    def end(self, work: Work, now: float) -> None:
        """End an attempt, whatever its ending. The next `catch_up` publishes the result."""
        self._has_ended = True
        if work.is_queued:
            if work.shows:
                self._dequeue(now)
                if work.is_queued:
                    self._drop(work, now)
            else:
                self._assume_computed(work, min(now, self._due))
        if work.expected is not None:
            self._followed -= 1
            if work.attempt.succeeded:
                self._learn_response(work, work.expected, now)

    def delay(self, uncached: float, prompt: float) -> float:
        """Return the sum of the seconds by which a prompt delays other responses.

        Each response pauses for the duration of the prompt, less the engine step that runs anyway. Responses whose
        prompts are being computed by another pod count too: most of them start before this prompt would be computed,
        and no scrape shows them. Requests that arrive while there is a queue wait for the prompt."""
        queued, running, _ = self.endpoint.view
        there = max(queued + running, self.endpoint.load.requests)
        computed = sum(work.stage is not Stage.DECODE and not work.is_queued for work in self._open_stages())
        responses = max(0, there - len(self.queue) - computed)
        elsewhere = 0.0 if self.lockstep is None else self.lockstep.elsewhere(self)
        return self.work(uncached, prompt) * (responses + elsewhere + LATER_PER_QUEUED * len(self.queue))

    def work(self, uncached: float, prompt: float) -> float:
        """Return the seconds for which this prompt occupies the pod."""
        fixed, per_token, per_pair = self._terms
        work = fixed - self.step + uncached * (per_token + per_pair * (2.0 * prompt - uncached))
        share = 1.0 if self._in_turn == 1.0 else self._fleet.in_turn_of(len(self.queue))
        return share * max(0.0, work)

    def catch_up(self, now: float) -> None:
        """Apply all changes since the last call, and publish the values that are read until the next change."""
        endpoint, queue = self.endpoint, self.queue
        if self._scrape is not endpoint.metrics:
            self._read_scrape(endpoint.metrics)
        if queue:
            self._dequeue(now)
        self.view = view = endpoint.view
        queued, running, _ = view
        running += queued - len(queue)
        if not -LEAST_CHANGE < running - self.running < LEAST_CHANGE or not self._is_paced:
            self._publish_pace(max(0, running), now)
        _, per_token, per_pair = self._terms
        self._others = ahead = self._foreign_tokens + endpoint.load.remote_tokens
        if queue:
            self.rest = (ahead + self._tokens) * per_token + self._pairs * per_pair
            self._publish_first(queue[0])
        else:
            self.rest = ahead * per_token + (STEP_REST * self.step if running > 0 else 0.0)
            self.head, self.overdue_factor, self.due = None, 0.0, 0.0
            self.valid_until = now + FADE_INTERVAL  # the view of an unused pod does not show that its observations fade
        if (beyond := view[0] + view[1] + 1 - self.sharing.slots) > 0.0:  # a slot ends after one response in turn
            self.rest += beyond * self._fleet.output * self.step / self.sharing.slots
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
        if in_turn < 1.0:  # otherwise only observations read it
            self.sharing.refresh(running)
        self._publish_cost(1.0)

    def _publish_cost(self, in_turn: float) -> None:
        """Compute `cost`. While a prompt is computed in turn, the running responses pause. `charge_lockstep` adds the
        cost for ranks that step together."""
        (work, decode), (fixed, per_token, per_pair), running = self.prices, self.own, self.running
        paused = running if self.lockstep is None else running * (1.0 - self.lockstep.share)
        delayed = 1.0 + work + in_turn * decode * paused
        response = decode * self._fleet.output
        base = delayed * fixed + response * (self.step + self.rates.per_running * (1 + running))
        self.cost = (base, delayed * per_token, delayed * per_pair)

    def _publish_first(self, first: Work) -> None:
        """Move the first prompt of the queue from `rest` to `due`."""
        fixed, per_token, per_pair = self._terms
        seconds = first.tokens * per_token + first.pairs * per_pair
        self.rest -= seconds
        self.due = self._due = due = self._since + fixed + seconds
        self.head = first.attempt
        self.valid_until, self.overdue_factor = (inf, -OVERDUE_FACTOR) if first.shows else (due, 0.0)

    def _publish_mixed(self, now: float) -> None:
        """Publish the weighted mean of both models. It is valid for a short time, because the queue progresses."""
        sharing, left, in_turn = self.sharing, self.due - now, self._fleet.in_turn_of(len(self.queue))
        self._line = line = self.rest + (left if left > 0.0 else left * self.overdue_factor)
        shared = 1.0 - in_turn
        ahead, longer = sharing.ahead(self._queue_tokens(), self._others)
        self.rest = in_turn * line + shared * (sharing.wait(self.endpoint.view) + sharing.per_ahead * ahead)
        self.due = self.overdue_factor = 0.0
        self.valid_until = now + MIXED_SECONDS
        fixed, per_token, per_pair = self._terms
        own = shared * (sharing.per_token + sharing.per_ahead * longer)
        self.own = (in_turn * fixed + shared * sharing.fixed, in_turn * per_token + own, in_turn * per_pair)
        self._publish_cost(in_turn)

    def _read_scrape(self, scrape: Metrics) -> None:
        """Apply a scrape. Waiting requests that no kvlane proxy sent, such as requests of other clients and preempted
        ones, count as tokens before the next prompt."""
        self._scrape = scrape
        self._fade(scrape.scraped_at)
        if self.lockstep is not None:
            self.lockstep.scraped(scrape)
        else:
            self.rates.set_cached(scrape.cached_tokens)
        self.sharing.read_scrape(scrape, self._has_ended)
        self._has_ended = False
        self._invalidate()
        self._foreign_tokens = 0.0
        if scrape.freshness is Freshness.FRESH and not self.endpoint.load.remote_requests and scrape.waiting:
            foreign = scrape.waiting - self._waiting_at(scrape.scraped_at)
            self._foreign_tokens = max(0, foreign) * self._fleet.prompt

    def _waiting_at(self, at: float) -> int:
        """Return the number of attempts of this proxy that waited for their first token at that time."""
        decoding = [work for work in self._open_stages() if work.stage is Stage.DECODE]
        begun = (work.attempt for work in (*self.queue, *decoding) if work.attempt.started_at <= at)
        return sum(attempt.first_byte_at is None or attempt.first_byte_at > at for attempt in begun)

    def _fade(self, now: float) -> None:
        fading = self.rates.fading
        if self.queue:  # a pod with a queue is in use
            fading.has_new_observation = True
        seconds = fading.seconds(now)
        if seconds:
            self.rates.fade(seconds)

    def _dequeue(self, now: float) -> None:
        """Remove prompts whose first token has arrived. For a response that is not streamed, the predicted time is
        assumed."""
        queue = self.queue
        if self._in_turn < 1.0:  # first tokens may arrive in any order
            times = [(work.attempt.first_byte_at, work) for work in queue if work.shows]
            for at, work in sorted(((at, work) for at, work in times if at is not None), key=itemgetter(0)):
                self._first_token_arrived(work, at)
        while queue:
            first = queue[0]
            attempt = first.attempt
            if not first.shows:
                if now < self._due:
                    return
                self._assume_computed(first, self._due)
                if queue:
                    self._publish_first(queue[0])
            elif attempt.first_byte_at is None:
                return
            else:
                self._first_token_arrived(first, attempt.first_byte_at)

    def _first_token_arrived(self, work: Work, at: float) -> None:
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
        """Remove a prompt from the queue. If it was the first, the pod starts the next one at this time."""
        queue = self.queue
        work.is_queued = False
        self._computed_tokens += work.tokens
        self._computed_pairs += work.pairs
        if queue[0] is work:
            queue.popleft()
            if at > self._since:
                self._since = at
        else:
            queue.remove(work)
        self._tokens = self._tokens - work.tokens if queue else 0.0
        self._pairs = self._pairs - work.pairs if queue else 0.0

    def _assume_computed(self, work: Work, at: float) -> None:
        """Remove a prompt whose response is not streamed, so that its first token is not seen."""
        self._drop(work, at)
        self._is_exact = False

    def _predict(self, work: Work, prompt: float, now: float) -> None:
        """Store the predictions of both models, which are compared with the observation."""
        if self.view is None:
            self.catch_up(now)
        in_turn = work.expected = seconds(self, work.tokens, prompt, now)
        if self._in_turn == 1.0:
            self.sharing.refresh(self.running)
        else:
            fixed, per_token, per_pair = self._terms
            in_turn = self._line + fixed + work.tokens * per_token + work.pairs * per_pair
        queue, view = list(self._queue_tokens()), self.endpoint.view
        work.predictions = self.sharing.predict(in_turn, work.tokens, queue, self._others, view)
        work.is_guess = self.rates.prefill.observed < LEAST_OBSERVED
        self._followed += 1

    def _learn_first_token(self, work: Work, at: float) -> None:
        sent = work.attempt.started_at
        if at > self._step_at + SAME_STEP_SECONDS:
            self._step_at = at
            self._start_group(sent, at)
        group = self._group
        if group is not None:
            group.tokens += work.tokens
            group.pairs += work.pairs
        if work.expected is not None:
            if not work.is_guess:
                self._fleet.observe_error(work.expected, at - sent)
            if work.predictions is not None:
                self.sharing.observe(work.predictions, at - sent)
                self._invalidate()
            self._count_running(at)
            work.first_token_at, work.running, work.prefilled = at, self._running_sum, self._prefilled

    def _start_group(self, sent: float, at: float) -> None:
        """Learn from the previous group, which is complete, and start the next one."""
        group, self._group = self._group, None
        if group is not None:
            self.rates.observe_prefill(group.seconds, group.steps, group.tokens, group.pairs)
            self._invalidate()
        since, steps = self._since, self.step
        queued, running, _ = self.endpoint.view
        if queued + running >= self.sharing.slots:  # it may have waited for a slot
            return
        if sent > since and self.running:
            steps += STEP_REST * steps
        seconds = at - max(since, sent)
        self._prefilled += self._in_turn * max(0.0, seconds - steps)
        if at >= self._next_group and self._is_exact:
            self._next_group = self._after_observation(at)
            self._group = _Group(seconds, steps)

    def _learn_response(self, work: Work, expected: float, now: float) -> None:
        """Learn from a complete response. A response that was not streamed shows only its total duration."""
        attempt, usage, fleet = work.attempt, work.attempt.usage, self._fleet
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
            self._learn_whole(work, expected, tokens, now)

    def _learn_whole(self, work: Work, expected: float, tokens: int, now: float) -> None:
        """Learn from the duration of a response that was not streamed: the pod computed prompts in it, this one and
        others, and tokens of the response. The coefficients of the fleet divide the time between them. A short
        duration, and one of a response without tokens, such as embeddings, show only the pod's speed."""
        rates, whole = self.rates, now - work.attempt.started_at
        if tokens < 1 or whole < SHORTEST_DIVIDED:
            predicted = expected / rates.slowness + max(0, tokens - 1) * (self.step + rates.per_running)
            rates.observe_slowness(predicted, whole)
            self._invalidate()
            return
        if now - self._step_at < STREAMS_RECENT:
            return
        self._count_running(now)
        running = (self._running_sum - work.running) / whole
        computed, pairs = self._computed_tokens - work.computed[0], self._computed_pairs - work.computed[1]
        share = self._fleet.observe_whole(whole, computed, tokens, running)
        rates.observe_prefill(share * whole, 0.0, computed, pairs)
        rates.observe_decode(running, (1.0 - share) * whole / tokens)
        self._invalidate()

    def _learn_pace(self, work: Work, first: float | None, counted: float, tokens: int, now: float) -> None:
        """Learn the seconds per token, without prefill time. The running requests and the seconds of prefill are
        counted since `counted`, and assumed to be spread evenly."""
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

    def _after_observation(self, now: float) -> float:
        """Count an observation. Return the time of the next one."""
        self._observations += 1
        if self._observations <= FIRST_OBSERVATIONS:
            return now
        return now + max(LEAST_OBSERVATION_INTERVAL, self._in_turn * OBSERVATION_INTERVAL)

    def _count_running(self, now: float) -> None:
        if now > self._running_at:
            self._running_sum += self.running * (now - self._running_at)
            self._running_at = now

    def _queue_tokens(self) -> Iterator[float]:
        """Yield the uncached tokens of each queued prompt without a first token."""
        return (work.tokens for work in self.queue if work.attempt.first_byte_at is None)

    def _open_stages(self) -> list[Work]:
        self._staged = [work for work in self._staged if work.attempt.ending is None]
        return self._staged


def seconds(pod: PodModel, uncached: float, prompt: float, now: float) -> float:
    """Return the time to first token of a prompt with this number of uncached tokens, from the terms of `own`: rest +
    wait + fixed + tokens * (per_token + per_pair * (2 * prompt - tokens)), where wait is the time until `due`, or a
    share of the time by which the first token is overdue."""
    fixed, per_token, per_pair = pod.own
    left = pod.due - now
    if left < 0.0:
        left *= pod.overdue_factor
    return pod.rest + left + fixed + uncached * (per_token + per_pair * (2.0 * prompt - uncached))


def catch_up(pods: Sequence[PodModel], now: float) -> None:
    """Call `catch_up` of the pods that have changed."""
    for pod in pods:
        head, known, view = pod.head, pod.view, pod.endpoint.view
        # A response that is not streamed shows no first token, so the time decides.
        has_begun = head is not None and head.first_byte_at is not None
        if has_begun or now > pod.valid_until or (known is not view and known != view):
            pod.catch_up(now)


def costs(
    pods: Sequence[PodModel], cold: float, size: float, units: Mapping[Endpoint, int], prompt: float, now: float
) -> list[float]:
    """Return `seconds` for each pod with the terms of `cost`, after `catch_up`. A pod has `cold - size * units[pod]`
    uncached tokens of the prompt, but not less than 0, or `cold` if it is not in `units`; see `prefix.match.Lacks`.
    Arguments are floats, because multiplication by an integer takes twice as long."""
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
        tokens = cold
        if endpoint in units:
            tokens -= size * units[endpoint]
            if tokens < 0.0:
                tokens = 0.0
        cost = pod.rest + fixed + tokens * (per_token + per_pair * (twice - tokens))
        if due := pod.due:  # 0: the queue is empty, or `rest` includes its first prompt
            left = due - now
            cost += left if left > 0.0 else left * pod.overdue_factor
        add(cost)
    return found


def charge_lockstep(
    pods: Sequence[PodModel],
    found: list[float],
    cold: float,
    size: float,
    units: Mapping[Endpoint, int],
    prompt: float,
    now: float,
) -> None:
    """Add to `found`, the result of `costs`, the cost for the responses on all ranks that step together.

    A step takes as long as on the slowest rank. So a prompt delays the responses only by the time that it adds to the
    longest queue of all ranks: a rank with a shorter queue computes it while the responses pause anyway. Over several
    seconds the busiest rank determines the speed, so a rank with more recent work than the others costs more."""
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
        tokens = max(0.0, cold - size * units.get(pod.endpoint, 0))
        _, per_token, per_pair = pod.own
        work = tokens * (per_token + per_pair * (2.0 * prompt - tokens))
        found[at] += WORK_PRICE * lockstep.share * (pod.worked(now) - usual)
        if (longer := pod.wait(now) + work - longest) > 0.0:
            found[at] += pod.prices.decode * lockstep.share * lockstep.running * longer
