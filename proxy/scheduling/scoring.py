"""From the scores of several scorers to one total per endpoint: the sum of share * score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import chain, repeat
from operator import add, mul

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Scorer
from proxy.core.request import InferenceRequest
from proxy.scheduling.guard import GuardedScorer

Totals = Callable[[ProfileRun, InferenceRequest, Sequence[Endpoint]], Sequence[float]]

_added_up = partial(reduce, partial(map, add))
"""One column of several."""


def unguarded(scorers: Sequence[GuardedScorer], shares: Sequence[float]) -> Totals:
    """For as little as can be. Of a sole scorer, as in the default profile, the scores are the totals."""
    return scorers[0].score if list(shares) == [1.0] else UnguardedScoring(scorers, shares).totals


class Scoring:
    """Asks scorers that give one score in [0, 1] per endpoint whatever happens, as guarded ones do, one by one."""

    def __init__(self, scorers: Sequence[Scorer], shares: Sequence[float]) -> None:
        self._scorers = tuple(scorers)
        self._weighted = partial(map, map, repeat(mul), tuple(map(repeat, shares)))
        """Every column of scores times its share, without a Python loop over the endpoints."""

    def totals(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        if not self._scorers:
            return [0.0] * len(endpoints)
        scores = [scorer.score(run, request, endpoints) for scorer in self._scorers]
        return list(_added_up(self._weighted(scores)))


class UnguardedScoring(Scoring):
    """The same for less (6.2 us, not 6.9, for four scorers of four pods): asks without the guards, looks once at what
    all have said, and where anything is wrong leaves it to them. Scorers change nothing, so they can be asked again."""

    def __init__(self, scorers: Sequence[GuardedScorer], shares: Sequence[float]) -> None:
        super().__init__(scorers, shares)
        self._unguarded = tuple(scorer.unguarded for scorer in scorers)
        self._count = len(scorers)

    def totals(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        try:
            scores = [scorer.score(run, request, endpoints) for scorer in self._unguarded]
            totals = list(_added_up(self._weighted(scores)))
            said = list(chain.from_iterable(scores))
            if (
                len(said) == len(endpoints) * self._count
                and len(totals) == len(endpoints)
                and min(said) >= 0.0
                and max(said) <= 1.0
                and sum(totals) >= 0.0  # which NaN is not, wherever it stood
            ):
                return totals
        except Exception:  # noqa: BLE001, S110  # the guards find out what it was, and say so
            pass
        return super().totals(run, request, endpoints)
