"""What is in flight on every pod, by this process and its siblings: the only writer of `endpoint.load`."""

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
"""In this time the memory of past work shrinks to 1/e."""


class Ledger(Listener):
    """In exactly once and out exactly once per attempt, whatever is called how often and in which order: what an
    attempt has put on its pod is written on the attempt, and taken off there.

    It is the first of the listeners: it reads how much is cached before prefix blocks are reserved for the attempt.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entered = 0
        """Attempts that started."""
        self.rank_check: RankCheck | None = None
        """Gets the ended attempts on data-parallel ranks. No listener of its own: fleets without ranks pay nothing."""
        self._left = 0

    @property
    def in_flight(self) -> int:
        """Attempts that started and have not ended."""
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
            attempt.endpoint.ledger["tokens"] -= prefill

    def attempt_ended(self, attempt: Attempt, error: BaseException | None = None) -> None:
        if charge := attempt.charge:
            prefill, output = charge
            attempt.charge = None
            self._left += 1
            attempt.endpoint.charge(-1, -prefill - output)
            if attempt.endpoint.rank is not None and self.rank_check is not None:
                self.rank_check.attempt_ended(attempt, error)

    def level(self, endpoint: Endpoint, peers: Iterable[Endpoint]) -> None:
        """A pod that joins counts as having worked as much as the least busy of its peers: without a past it would
        win every tie, and get all of the traffic, until it had caught up with a minute of theirs."""
        least = min((peer.load.recent for peer in peers if peer is not endpoint), default=-inf)
        vars(endpoint.load)["recent"] = max(endpoint.load.recent, least)

    def elsewhere(self, endpoint: Endpoint, requests: int, tokens: int, work: int = 0) -> None:
        """What the siblings of this process have in flight on the pod, all of it, and the prompt tokens they sent it
        since they last said so."""
        load = endpoint.load
        endpoint.charge(requests - load.remote_requests, tokens - load.remote_tokens)
        vars(load).update(remote_requests=requests, remote_tokens=tokens)
        if work > 0:
            self._remember(endpoint, work)

    def _remember(self, endpoint: Endpoint, work: int) -> None:
        """Instead of shrinking all past work, later work counts for more, by a factor that grows with the time. The sum
        is made of logarithms, which do not overflow; the past never is e^700 times the work of one request."""
        load = endpoint.ledger
        added = log(work / endpoint.weight) + self._clock.now() / RECENT_SECONDS
        load["recent"] = added + log1p(exp(load["recent"] - added))


class SharedLedger(Ledger):
    """A ledger that says what this process changed: `dispatched(endpoint, work)` after every request that it sent, with
    the prompt tokens of it and one more, and `eased(endpoint)` where there is less."""

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
