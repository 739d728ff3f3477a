"""Whether a pod computes requests on the data-parallel ranks that they name.

An engine that does not know the header places requests by itself. Then its counters of prompt tokens grow on other
ranks than the ranks that got the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import RankOutOfRange
from proxy.core.ports import Clock

ENOUGH = 16
"""Number of responses that are compared with the counters at a time."""

SLACK = 0.5
"""Seconds after the end of a response until its tokens are certainly in a scrape."""

MISPLACED = 0.25
"""Share of prompt tokens on other ranks from which on the pod counts as ignoring ranks."""

PATHS_THAT_OBEY_RANK = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages"))
"""APIs for which current engines obey the rank. vLLM 0.32 and SGLang 0.5.19 choose the rank of /v1/responses
themselves."""

STRIKES = 2
"""Number of consecutive comparisons that must agree."""


class _Window:
    """Responses of one pod since a scrape."""

    def __init__(self, pod: Endpoint) -> None:
        self.strikes = 0
        self.restart(pod)

    def restart(self, pod: Endpoint) -> None:
        self.ranks = pod.ranks
        self.began = pod.metrics.scraped_at
        self.counted = _counted(pod)
        self.sent: list[tuple[float, int, int]] = []
        """When the response ended, its rank and its prompt tokens."""


class RankCheck:
    """Compares the prompt tokens of responses with the counters of the ranks. `ignored` is called with the pod whose
    tokens are on other ranks, and `refused` with a rank that its pod does not have, and the number of ranks it has."""

    def __init__(
        self, clock: Clock, ignored: Callable[[Endpoint], None], refused: Callable[[Endpoint, int], None]
    ) -> None:
        self._clock = clock
        self._ignored = ignored
        self._refused = refused
        self._windows: dict[Endpoint, _Window] = {}

    def attempt_ended(self, attempt: Attempt, error: BaseException | None = None) -> None:
        """An attempt on a rank has ended."""
        if isinstance(error, RankOutOfRange):
            self._refused(attempt.endpoint, error.size)
            return
        pod, rank, usage = attempt.endpoint.first_rank, attempt.endpoint.rank, attempt.usage
        window = self._windows.get(pod)
        if window is None or window.ranks != pod.ranks:
            self._windows = {
                known: one for known, one in self._windows.items() if known.state is not EndpointState.GONE
            }
            self._windows[pod] = _Window(pod)
            return
        if rank is None or usage is None or not attempt.succeeded or attempt.stage is not Stage.WHOLE:
            return
        if attempt.request.path not in PATHS_THAT_OBEY_RANK:
            return
        if attempt.started_at > window.began:
            window.sent.append((self._clock.now(), rank, usage.prompt_tokens))
            self._compare(pod, window)

    def _compare(self, pod: Endpoint, window: _Window) -> None:
        seen = pod.metrics.scraped_at - SLACK
        if len(window.sent) < ENOUGH or window.sent[ENOUGH - 1][0] > seen:
            return
        sent = [0] * len(window.ranks)
        for ended, rank, tokens in window.sent:
            if ended <= seen:
                sent[rank] += tokens
        grown = [after - before for before, after in zip(window.counted, _counted(pod), strict=True)]
        is_known = min(window.counted) >= 0 and min(grown) >= 0
        misplaced = is_known and _misplaced(sent, grown) > MISPLACED * sum(sent)
        window.strikes = window.strikes + 1 if misplaced else 0
        if window.strikes >= STRIKES:
            del self._windows[pod]
            self._ignored(pod)
        else:
            window.restart(pod)


def _misplaced(sent: Sequence[float], grown: Sequence[float]) -> float:
    """Return the tokens that other ranks have, less the tokens that no rank has counted."""
    missing = sum(max(0.0, mine - its) for mine, its in zip(sent, grown, strict=True))
    return missing - max(0.0, sum(sent) - sum(grown))


def _counted(pod: Endpoint) -> list[float]:
    return [rank.metrics.prompt_tokens for rank in pod.ranks]
