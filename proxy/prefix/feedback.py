"""Learning from what pods report about their caches, and the eviction from the prefix index: of what a pod has probably
evicted, beyond its capacity, after long disuse and at the memory limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, Metrics
from proxy.prefix.forest import CachedResponse, Forest, Holding, PodMemory, Reservation

WORK = 256
"""Largest number of holdings that one call clears or evicts for one reason: half a millisecond."""

EVIDENCE_BLOCKS = 4
"""Predictions of fewer blocks prove nothing: engines cache only whole blocks and never the end of a prompt."""

MISSES_UNTIL_FORGOTTEN = 3
"""Number of consecutive responses with less than a tenth of the predicted hits after which a pod counts as
restarted."""

SHORT = 0.75
"""Share of the known blocks that is normally found: the number of bytes per token varies within a text."""

KEPT = 0.5
"""Share of found responses above which responses count as cached: templates may render reasoning and tool calls
differently in later turns."""

KEPT_STEP = 0.1

DECAY = 0.95
"""Weight of the past in the mean error, per response."""


@dataclass(slots=True, eq=False)
class IndexEviction:
    """Eviction for the pods in `pods`. `due_at` is when the next call must run: at once after an addition, and while
    work is left over; otherwise once a second."""

    forest: Forest
    pods: Mapping[Endpoint, PodMemory]
    ttl: float
    max_bytes: float
    due_at: float = -math.inf
    _expire_at: float = -math.inf

    def expire_soon(self) -> None:
        self.due_at = self._expire_at = -math.inf

    def run(self, pod: PodMemory, now: float) -> None:
        """Evict for this pod in bounded steps; later calls continue."""
        cleared = self.forest.clear(WORK)
        capacity = pod.capacity
        # Nothing else fits beside what the pod computes on; of that, prompts are pinned here, responses are not.
        pod.limit = min(capacity, pod.pinned + (1 - pod.endpoint.metrics.kv_usage) * capacity)
        if pod.blocks + pod.response_blocks > pod.limit:
            self._evict(pod, pod.limit - min(capacity // 64, 512))
        if now >= self._expire_at:
            self._expire(now)
        if self.forest.bytes > self.max_bytes:
            self._shrink()
        done = cleared and self.forest.bytes <= self.max_bytes
        self.due_at = self._expire_at if done else -math.inf

    def _evict(self, pod: PodMemory, target: float) -> None:
        """Evict to somewhat below the capacity, so that few segments are cut and most calls have nothing to do."""
        for _ in range(WORK):
            excess, holding = math.ceil(pod.blocks + pod.response_blocks - target), pod.oldest
            if excess <= 0 or holding is None:
                return
            if holding.response is not None:
                self.forest.drop_response(holding.response)
                continue
            segment = holding.segment
            kept = self.forest.fitting(segment.start, segment.blocks - excess)
            if kept > 0:
                self.forest.split(segment, kept)
            self.forest.drop(pod, holding)

    def _expire(self, now: float) -> None:
        work = WORK
        for pod in self.pods.values():
            gone = max(now - self.ttl, pod.horizon)
            while (oldest := pod.oldest) is not None and _used_at(oldest) <= gone:
                if not work:
                    return
                self.forest.drop(pod, oldest)
                work -= 1
        self._expire_at = now + min(1.0, self.ttl)

    def _shrink(self) -> None:
        """Evict in batches from the pod with the oldest holding, because finding that pod takes a step per pod."""
        for _ in range(8):
            victim = min(self.pods.values(), key=lambda pod: _used_at(pod.oldest))
            for _ in range(WORK // 8):
                oldest = victim.oldest
                if oldest is None or self.forest.bytes <= self.max_bytes:
                    return
                self.forest.drop(victim, oldest)

    def learn(self, reservation: Reservation, prompt_tokens: int, cached_tokens: int) -> bool:
        """Learn from a response. Return False if it proves that the pod has lost its cache."""
        pod, spans = reservation.pod, reservation.spans
        depth_of = self.forest.depth_of
        known = sum([depth_of(confirmed) for _, _, confirmed, _ in spans])
        total = max(1, sum([depth_of(len(chain)) for chain, _, _, _ in spans]))
        found = cached_tokens * total / max(1, prompt_tokens)
        expected = known
        if reservation.response is not None and known < reservation.expected:
            expected = self._weigh_response(reservation, known, found)
        predicted = prompt_tokens * expected / total
        pod.wrong_tokens = DECAY * pod.wrong_tokens + abs(predicted - cached_tokens)
        pod.prompt_tokens = DECAY * pod.prompt_tokens + prompt_tokens
        if known < EVIDENCE_BLOCKS or pod.retired:
            return True
        pod.misses = pod.misses + 1 if cached_tokens < predicted / 10 else 0
        if pod.misses >= MISSES_UNTIL_FORGOTTEN:
            return False
        if (found < known * SHORT or pod.suspect is not None) and len(spans) == 1 and not reservation.settled:
            self._date(reservation, found)
        return True

    def forget_share(self, pod: PodMemory, share: float) -> None:
        """Forget blocks after only this share of the expected hits was found, of unknown prompts. Engines evict the
        least recently used blocks first, so the same share of the unused ones is forgotten here."""
        gone = (pod.blocks - pod.pinned) * (1 - share)
        for holding in pod.idle():
            gone -= holding.segment.blocks
            if gone < -holding.segment.blocks / 2:
                break
            if holding.used_at is not None:
                pod.horizon = holding.used_at
        self.expire_soon()

    def _weigh_response(self, reservation: Reservation, known: int, found: float) -> int:
        """Learn whether this pod's responses are found again; return the blocks that were to be found."""
        pod, expected = reservation.pod, reservation.expected
        are_kept = pod.keeps >= KEPT
        if found > known / 2:
            share = (found - known) / (expected - known)
            pod.keeps += KEPT_STEP * (min(1.0, max(0.0, share)) - pod.keeps)
        return expected if are_kept else known

    def _date(self, reservation: Reservation, found: float) -> None:
        """Engines evict the least recently used blocks first. So if most of the least recently used part of this prompt
        is gone, everything used before it is gone too. One prompt does not suffice as proof, because a template may
        render earlier turns differently; two do, if nothing older is found between them."""
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
            self.expire_soon()

    def _longest_unused(self, reservation: Reservation) -> tuple[float, int, int]:
        """Return the least recently used part of what the pod held of a prompt, always its end: the time of its use and
        the blocks at which it starts and ends."""
        ((chain, _, confirmed, _),) = reservation.spans
        used_at, start, end = math.inf, 0, 0
        for holding in self.forest.path(reservation.pod, chain, confirmed):
            if holding.used_at is not None and holding.used_at < used_at:
                used_at, start = holding.used_at, end
            end += holding.segment.blocks
        return used_at, start, end


def _used_at(holding: Holding | None) -> float:
    return math.inf if holding is None or holding.used_at is None else holding.used_at


def are_kept(response: CachedResponse) -> bool:
    return response.pod.keeps >= KEPT


Figures = tuple[float, float | None, int | None, int]

ENOUGH_TOKENS = 4096
"""Smallest number of predicted hits that are judged together."""

ENOUGH_ATTEMPTS = 4

MOST_ATTEMPTS = 1000
"""Largest number of attempts that a window stores of a pod without usable counters."""

figures: Callable[[Attempt], Figures] = attrgetter(
    "started_at", "first_byte_at", "predicted_cached_tokens", "request.prompt.tokens"
)
"""Return the figures of an attempt with predicted hits whose first byte has arrived."""


class HitWindow:
    """Predicted hits compared with the hits that the pod has counted since `opened`. The counters include hits of
    other requests: earlier ones, and requests of other clients. So the window can prove that predicted hits were
    missed, not that they occurred. `ended` gets the figures of each ended attempt."""

    __slots__ = ("ended", "opened")

    def __init__(self, metrics: Metrics) -> None:
        self.open(metrics)

    def open(self, metrics: Metrics) -> None:
        self.opened = metrics
        self.ended: list[Any] = []

    def found(self, metrics: Metrics, running: Sequence[Any]) -> float | None:
        """Return the largest possible share of found hits; None while it is uncertain. `running` are the figures of
        running attempts. Afterwards the window must be opened again."""
        attempts, opened = [*self.ended, *running], self.opened
        if len(attempts) < ENOUGH_ATTEMPTS:
            return None
        since, until = opened.scraped_at, metrics.scraped_at
        counted = predicted = prompts = 0
        for started_at, first_byte_at, prediction, prompt in attempts:
            if started_at >= since and first_byte_at <= until:  # counted by the pod between the scrapes
                counted += 1
                predicted += prediction
                prompts += prompt
        if predicted < ENOUGH_TOKENS or counted < ENOUGH_ATTEMPTS:
            return None
        if metrics.prefix_queries - opened.prefix_queries < prompts / 2:
            return None  # It counts something else, or nothing at all.
        return (metrics.prefix_hits - opened.prefix_hits) / predicted
