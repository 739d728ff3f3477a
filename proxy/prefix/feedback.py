"""What is learned of a pod's memory from how many cached tokens it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

from proxy.prefix.forest import Forest
from proxy.prefix.holdings import Answer, PodMemory
from proxy.prefix.reservation import Reservation
from proxy.prefix.upkeep import Upkeep

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
