"""The load of each pod by this process and its peers. `endpoint.load` changes by this module and `Endpoint.charge`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import exp, inf, log, log1p

from proxy.core.attempt import WHOLE, Attempt, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.request import OUTPUT_ESTIMATE
from proxy.fleet.rank_check import RankCheck
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT

RECENT_SECONDS = 60.0
"""Time in seconds in which past work decays to 1/e."""


class Ledger(Listener):
    """Counts each attempt in exactly once and out exactly once, in any order of calls: what an attempt has added to its
    pod is stored in the attempt and subtracted from there. It is the first listener, because admissions and hooks read
    `attempt.charge`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entered = 0
        """Number of started attempts."""
        self.rank_check: RankCheck | None = None
        """Receives the ended attempts on data-parallel ranks. It is no listener of its own, so that fleets without
        ranks pay nothing."""
        self._left = 0

    @property
    def in_flight(self) -> int:
        """Number of attempts that have started and not ended."""
        return self.entered - self._left

    def attempt_started(self, attempt: Attempt) -> None:
        if attempt.charge is not None or attempt.ending is not None:
            return
        endpoint, request = attempt.endpoint, attempt.request
        read = request.state.read
        prefill, output, match = (read(TOKENIZED_PROMPT) or request.prompt).tokens, 0, read(PREFIX_MATCH)
        if match is not None:
            cached = match.blocks_on(endpoint) * match.block_size
            prefill = prefill - cached if prefill > cached else 0
        if (estimate := read(OUTPUT_ESTIMATE)) is not None:
            output = estimate
        if attempt.stage is not WHOLE:
            prefill, output = (0, output) if attempt.stage is Stage.DECODE else (prefill, 0)
        attempt.charge = (prefill, output)
        self.entered += 1
        endpoint.charge(1, prefill + output)
        self._remember(endpoint, prefill + 1)

    def first_byte(self, attempt: Attempt) -> None:
        """The prompt is in the KV cache; the tokens of the expected response stay."""
        if charge := attempt.charge:
            prefill, output = charge
            attempt.charge = (0, output)
            attempt.endpoint.load_fields["tokens"] -= prefill

    def attempt_ended(self, attempt: Attempt, error: BaseException | None = None) -> None:
        if charge := attempt.charge:
            prefill, output = charge
            attempt.charge = None
            self._left += 1
            attempt.endpoint.charge(-1, -prefill - output)
            if attempt.endpoint.rank is not None and self.rank_check is not None:
                self.rank_check.attempt_ended(attempt, error)

    def level(self, endpoint: Endpoint, peers: Iterable[Endpoint]) -> None:
        """Give a new pod as much past work as its least busy peer has. Without it, the pod would win every tie and get
        all of the traffic for a minute."""
        least = min((peer.load.recent for peer in peers if peer is not endpoint), default=-inf)
        endpoint.load_fields["recent"] = max(endpoint.load.recent, least)

    def elsewhere(self, endpoint: Endpoint, requests: int, tokens: int, work: int = 0) -> None:
        """Set the load of the peers on the pod, and add the prompt tokens that they sent it since their last report."""
        load = endpoint.load_fields
        endpoint.charge(requests - load["remote_requests"], tokens - load["remote_tokens"])
        load["remote_requests"], load["remote_tokens"] = requests, tokens
        if work > 0:
            self._remember(endpoint, work)

    def _remember(self, endpoint: Endpoint, work: int) -> None:
        """Add work. Instead of decaying all past work, later work counts for more, by a factor that grows with time.
        The sum is kept as a logarithm, which does not overflow; the past is never e^700 times the work of one
        request."""
        load = endpoint.load_fields
        added = log(work / endpoint.weight) + self._clock.now() / RECENT_SECONDS
        load["recent"] = added + log1p(exp(load["recent"] - added))


class SharedLedger(Ledger):
    """A ledger that reports changes of this process: `dispatched(endpoint, work)` after every request, with its
    uncached prompt tokens plus one, and `eased(endpoint)` after a decrease."""

    def __init__(
        self, clock: Clock, dispatched: Callable[[Endpoint, int], None], eased: Callable[[Endpoint], object]
    ) -> None:
        super().__init__(clock)
        self._dispatched = dispatched
        self._eased = eased

    def attempt_started(self, attempt: Attempt) -> None:
        known = attempt.charge is not None
        Ledger.attempt_started(self, attempt)
        if attempt.charge is not None and not known:
            self._dispatched(attempt.endpoint, attempt.charge[0] + 1)

    def first_byte(self, attempt: Attempt) -> None:
        Ledger.first_byte(self, attempt)
        self._eased(attempt.endpoint)

    def attempt_ended(self, attempt: Attempt, error: BaseException | None = None) -> None:
        Ledger.attempt_ended(self, attempt, error)
        self._eased(attempt.endpoint)
