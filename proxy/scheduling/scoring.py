"""From the scores of several scorers to one total per endpoint: the sum of share * score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import chain, repeat
from operator import add, mul

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.scheduling.guard import GuardedScorer

Totals = Callable[[ProfileRun, InferenceRequest, Sequence[Endpoint]], Sequence[float]]

_added_up = partial(reduce, partial(map, add))
"""One column of several."""


class Scoring:
    """Guarded scorers, which give one score in [0, 1] per endpoint whatever happens, and the share of each."""

    def __init__(self, scorers: Sequence[GuardedScorer], shares: Sequence[float]) -> None:
        self.scorers = tuple(scorers)
        self._shares = tuple(shares)
        self._weighted = partial(map, map, repeat(mul), tuple(map(repeat, shares)))
        """Every column of scores times its share, without a Python loop over the endpoints."""
        self._plugins = tuple(scorer.unguarded for scorer in scorers)

    def added_up(self, columns: Sequence[Sequence[float]], endpoints: int) -> list[float]:
        """Return the totals of the scores that the scorers gave."""
        return list(_added_up(self._weighted(columns))) if columns else [0.0] * endpoints

    def unguarded(self) -> Totals:
        """Return what makes the totals with the fewest calls. The scores of a sole scorer are the totals."""
        return self.totals if self.sole is None else self.sole.score

    @property
    def sole(self) -> GuardedScorer | None:
        """The scorer whose scores are the totals, if there is one."""
        return self.scorers[0] if self._shares == (1.0,) else None

    def totals(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        """Ask the plugins without their guards, check once what all have said, and ask the guards where anything is
        wrong: scorers change nothing, so they can be asked again. For four scorers of four pods 6.2 us, not 6.9."""
        try:
            scores = [scorer.score(run, request, endpoints) for scorer in self._plugins]
            totals = self.added_up(scores, len(endpoints))
            said = list(chain.from_iterable(scores))
            if (
                len(said) == len(endpoints) * len(scores)
                and len(totals) == len(endpoints)
                and min(said, default=0.0) >= 0.0
                and max(said, default=0.0) <= 1.0
                and sum(totals) >= 0.0  # which NaN is not, wherever it stood
            ):
                return totals
        except Exception:  # noqa: BLE001, S110  # the guards find out what it was, and say so
            pass
        return self.added_up([scorer.score(run, request, endpoints) for scorer in self.scorers], len(endpoints))
