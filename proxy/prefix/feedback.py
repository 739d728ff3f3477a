"""What the prefix index forgets, and when: beyond a pod's capacity, long unused, at its memory limit, or because a pod
reported fewer cached tokens than predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, Metrics
from proxy.prefix.forest import Answer, Forest, Holding, PodMemory, Reservation

WORK = 256
"""Holdings that one call clears or evicts at most for one reason: half a millisecond."""


class Upkeep:
    """Of the pods in `pods`. `due_at` is when the next call has to run it: at once after something was added, which
    the index sees to, and while something is left over; otherwise once a second."""

    def __init__(self, forest: Forest, pods: Mapping[Endpoint, PodMemory], ttl: float, max_bytes: float) -> None:
        self._forest = forest
        self._pods = pods
        self._ttl = ttl
        self.max_bytes = max_bytes
        self._expire_at = -math.inf
        self.due_at = -math.inf

    def expire_soon(self) -> None:
        self.due_at = self._expire_at = -math.inf

    def run(self, pod: PodMemory, now: float) -> None:
        """For what was done to this pod; in bounded steps: what is left over is done by later calls."""
        cleared = self._forest.clear(WORK)
        capacity = pod.capacity
        # What the pod computes on has no room for anything else; of that, prompts are pinned here, answers are not.
        pod.limit = min(capacity, pod.pinned + (1 - pod.endpoint.metrics.kv_usage) * capacity)
        if pod.blocks + pod.answered > pod.limit:
            self._evict(pod, pod.limit - min(capacity // 64, 512))
        if now >= self._expire_at:
            self._expire(now)
        if self._forest.bytes > self.max_bytes:
            self._shrink()
        done = cleared and self._forest.bytes <= self.max_bytes
        self.due_at = self._expire_at if done else -math.inf

    def _evict(self, pod: PodMemory, target: float) -> None:
        """Down to somewhat below the capacity, so that few segments are cut and most calls find nothing to do."""
        for _ in range(WORK):
            excess, holding = math.ceil(pod.blocks + pod.answered - target), pod.oldest
            if excess <= 0 or holding is None:
                return
            if holding.answer is not None:
                self._forest.drop_answer(holding.answer)
                continue
            segment = holding.segment
            kept = self._forest.fitting(segment.start, segment.blocks - excess)
            if kept > 0:
                self._forest.split(segment, kept)
            self._forest.drop(pod, holding)

    def _expire(self, now: float) -> None:
        work = WORK
        for pod in self._pods.values():
            gone = max(now - self._ttl, pod.horizon)
            while (oldest := pod.oldest) is not None and _used_at(oldest) <= gone:
                if not work:
                    return
                self._forest.drop(pod, oldest)
                work -= 1
        self._expire_at = now + min(1.0, self._ttl)

    def _shrink(self) -> None:
        """In batches from the pod with the oldest holding, since looking for that pod takes a step per pod."""
        for _ in range(8):
            victim = min(self._pods.values(), key=_age)
            for _ in range(WORK // 8):
                oldest = victim.oldest
                if oldest is None or self._forest.bytes <= self.max_bytes:
                    return
                self._forest.drop(victim, oldest)


def _age(pod: PodMemory) -> float:
    """When what the pod forgets next was used."""
    oldest = pod.oldest
    return _used_at(oldest) if oldest is not None else math.inf


def _used_at(holding: Holding) -> float:
    return holding.used_at if holding.used_at is not None else math.inf


EVIDENCE_BLOCKS = 4
"""A prediction of fewer blocks proves nothing: engines cache whole blocks of theirs only, and never a prompt's end."""

MISSES_UNTIL_FORGOTTEN = 3
"""Answers in a row, each with less than a tenth of the hits that were predicted, after which a pod counts as new."""

SHORT = 0.75
"""Share of the known blocks that is found at least, if nothing is wrong: text has more bytes to a token in one place
than in another."""

KEPT = 0.5
"""Share of answers found again above which they are counted on: templates may show reasoning and calls differently when
they have become the past."""

KEPT_STEP = 0.1

DECAY = 0.95
"""Of what counts for the mean error, with each answer."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prompt tokens, as the engine counts them, that a pod was expected to have cached, and those it had; over the
    answers that reported them. `error` is the mean difference lately, as a share of the prompts."""

    predicted_tokens: float = 0.0
    actual_tokens: float = 0.0
    error: float = 0.0

    @classmethod
    def of(cls, pod: PodMemory) -> Prediction:
        return cls(pod.predicted_tokens, pod.actual_tokens, pod.wrong_tokens / max(1.0, pod.prompt_tokens))


class Feedback:
    """`depth_of` gives the blocks that so many hashes from the start of a chain stand for."""

    def __init__(self, forest: Forest, upkeep: Upkeep, depth_of: Callable[[int], int]) -> None:
        self._forest = forest
        self._upkeep = upkeep
        self._depth_of = depth_of

    def learn(self, reservation: Reservation, prompt_tokens: int, cached_tokens: int) -> bool:
        """False if this proved the pod to have lost its memory."""
        pod, spans = reservation.pod, reservation.spans
        known = sum(map(self._depth_of, map(_KNOWN, spans)))
        total = max(1, sum(map(self._depth_of, map(len, map(_CHAIN, spans)))))
        found = cached_tokens * total / max(1, prompt_tokens)
        expected = known
        if reservation.answer is not None and known < reservation.expected:
            expected = self._weigh_answer(reservation, known, found)
        predicted = prompt_tokens * expected / total
        _count(pod, prompt_tokens, predicted, cached_tokens)
        if known < EVIDENCE_BLOCKS or pod.retired:
            return True
        pod.misses = pod.misses + 1 if cached_tokens < predicted / 10 else 0
        if pod.misses >= MISSES_UNTIL_FORGOTTEN:
            return False
        if (found < known * SHORT or pod.suspect is not None) and len(spans) == 1 and not reservation.settled:
            self._date(reservation, found)
        return True

    def doubt(self, pod: PodMemory, share: float) -> None:
        """Only this share of what was expected of the pod was found; of which prompts is not known. Engines forget what
        was used longest ago, so that is taken to be gone: as much of what no request uses."""
        gone = (pod.blocks - pod.pinned) * (1 - share)
        for holding in pod.idle():
            gone -= holding.segment.blocks
            if gone < -holding.segment.blocks / 2:
                break
            if holding.used_at is not None:
                pod.horizon = holding.used_at
        self._upkeep.expire_soon()

    def _weigh_answer(self, reservation: Reservation, known: int, found: float) -> int:
        """Learns whether this pod's answers are found again; gives the blocks that were to be found."""
        pod, expected = reservation.pod, reservation.expected
        are_kept = pod.keeps >= KEPT
        if found > known / 2:
            share = (found - known) / (expected - known)
            pod.keeps += KEPT_STEP * (min(1.0, max(0.0, share)) - pod.keeps)
        return expected if are_kept else known

    def _date(self, reservation: Reservation, found: float) -> None:
        """Engines forget what was used longest ago. So if most of what this prompt's longest unused part was to give is
        gone, whatever was used before that is gone as well. The word of one prompt is not taken for it, since a
        template may show the past in another way; that of two is, if nothing older is found between them."""
        pod, suspect = reservation.pod, reservation.pod.suspect
        used_at, start, end = self._longest_unused(reservation)
        if found >= (start + end) / 2:
            if suspect is not None and used_at <= suspect:
                pod.suspect = None
        elif suspect is None:
            pod.suspect = used_at
        else:
            pod.suspect = max(suspect, used_at)
            pod.horizon = max(pod.horizon, math.nextafter(min(suspect, used_at), -math.inf))
            self._upkeep.expire_soon()

    def _longest_unused(self, reservation: Reservation) -> tuple[float, int, int]:
        """Of what the pod was known to hold of a prompt, that which was used longest ago, always the end of it: when
        that was, and the blocks at which it starts and ends."""
        ((chain, _, known, _),) = reservation.spans
        used_at, start, end = math.inf, 0, 0
        for holding in self._forest.way(reservation.pod, chain, known):
            if holding.used_at is not None and holding.used_at < used_at:
                used_at, start = holding.used_at, end
            end += holding.segment.blocks
        return used_at, start, end


def are_kept(answer: Answer) -> bool:
    """Whether the pod's answers are counted on."""
    return answer.pod.keeps >= KEPT


def _count(pod: PodMemory, prompt: int, predicted: float, actual: int) -> None:
    pod.predicted_tokens += predicted
    pod.actual_tokens += actual
    pod.wrong_tokens = DECAY * pod.wrong_tokens + abs(predicted - actual)
    pod.prompt_tokens = DECAY * pod.prompt_tokens + prompt


_CHAIN, _KNOWN = itemgetter(0), itemgetter(2)


Figures = tuple[float, float | None, int | None, int]

ENOUGH_TOKENS = 4096
"""Predicted hits that are judged together, at least."""

ENOUGH_LEGS = 4

MOST_LEGS = 1000
"""That a window remembers of a pod whose counters cannot be used."""


def figures(attempt: Attempt) -> Figures:
    """What is needed of a leg whose first byte has come, and for which hits, or none, were predicted."""
    prompt = attempt.request.prompt
    return (attempt.started_at, attempt.first_byte_at, attempt.predicted_cached_tokens, prompt.tokens)


class HitWindow:
    """Hits that were predicted beside those that the pod has counted since `opened`.

    Between two scrapes stand the hits of other requests too: of those that began before the first, and of other
    clients. They make the count larger, never smaller. So it can prove that predicted hits were missed, not that they
    came.
    `ended` takes the figures of each leg that has ended.
    """

    __slots__ = ("ended", "opened")

    def __init__(self, metrics: Metrics) -> None:
        self.open(metrics)

    def open(self, metrics: Metrics) -> None:
        self.opened = metrics
        self.ended: list[Any] = []

    def found(self, metrics: Metrics, running: Sequence[Any]) -> float | None:
        """Share of the predicted hits that came, at most; None while it cannot be told. `running` are the figures of
        legs that have not ended. The window must be opened anew after it was told."""
        legs, opened = [*self.ended, *running], self.opened
        if len(legs) < ENOUGH_LEGS:
            return None
        since, until = opened.scraped_at, metrics.scraped_at
        told = predicted = asked = 0
        for began, answered, prediction, prompt in legs:
            if began >= since and answered <= until:  # Whatever the pod counted for it lies between the two scrapes.
                told += 1
                predicted += prediction
                asked += prompt
        if predicted < ENOUGH_TOKENS or told < ENOUGH_LEGS:
            return None
        if metrics.prefix_queries - opened.prefix_queries < asked / 2:
            return None  # It counts something else, or nothing at all.
        return (metrics.prefix_hits - opened.prefix_hits) / predicted
