"""What is in flight on every pod, by this process and its siblings: the only writer of `endpoint.load`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proxy.core.endpoint import Endpoint, Load
from proxy.core.exchange import Exchange
from proxy.core.ports import Clock
from proxy.core.request import OUTPUT_ESTIMATE
from proxy.prefix.keys import PREFIX_MATCH, TOKENIZED_PROMPT, uncached_tokens

RECENT_SECONDS = 60.0
"""In this time the memory of past work shrinks to 1/e."""


@dataclass(slots=True)
class _Charge:
    """What one exchange put on one load. It holds the load itself: that of a removed pod is settled where it was."""

    load: Load
    prefill: int
    output: int


class Ledger:
    """In exactly once and out exactly once per exchange, whatever is called how often and in which order.

    `enter` comes before anything reserves prefix blocks for the same request: it reads how much is cached.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._charges: dict[Exchange, _Charge] = {}

    @property
    def in_flight(self) -> int:
        """Exchanges that entered and have not left."""
        return len(self._charges)

    def enter(self, exchange: Exchange) -> None:
        if exchange in self._charges or exchange.ending is not None:
            return
        endpoint, load = exchange.endpoint, exchange.endpoint.load
        prefill = _uncached(exchange)
        output = exchange.request.state.read(OUTPUT_ESTIMATE) or 0
        self._charges[exchange] = _Charge(load, prefill, output)
        load.requests += 1
        load.dispatched += 1
        load.tokens += prefill + output
        load.recent = _log_sum(load.recent, math.log((prefill + 1) / endpoint.weight) + self._growth())

    def first_byte(self, exchange: Exchange) -> None:
        """The prompt is in the KV cache; what the answer is expected to take stays."""
        if charge := self._charges.get(exchange):
            charge.load.tokens -= charge.prefill
            charge.prefill = 0

    def leave(self, exchange: Exchange) -> None:
        if charge := self._charges.pop(exchange, None):
            charge.load.tokens -= charge.prefill + charge.output
            charge.load.requests -= 1
            charge.load.finished += 1

    def level(self, endpoint: Endpoint, peers: Iterable[Endpoint]) -> None:
        """A pod that joins counts as having worked as much as the least busy of its peers: without a past it would
        win every tie, and get all of the traffic, until it had caught up with a minute of theirs."""
        least = min((peer.load.recent for peer in peers if peer is not endpoint), default=-math.inf)
        endpoint.load.recent = max(endpoint.load.recent, least)

    def elsewhere(self, endpoint: Endpoint, requests: int, tokens: int, work: int = 0) -> None:
        """What the siblings of this process have in flight on the pod, all of it, and the prompt tokens they sent it
        since they last said so."""
        load = endpoint.load
        more = requests - load.remote_requests
        load.requests += more
        load.tokens += tokens - load.remote_tokens
        load.dispatched += max(more, 0)
        load.finished += max(-more, 0)
        load.remote_requests, load.remote_tokens = requests, tokens
        if work > 0:
            load.recent = _log_sum(load.recent, math.log(work / endpoint.weight) + self._growth())

    def _growth(self) -> float:
        """Instead of shrinking all past work, later work counts for more: this is the log of how much more."""
        return self._clock.now() / RECENT_SECONDS


class SharedLedger(Ledger):
    """A ledger that says what changed: `changed(endpoint, work)` after every change that this process made, with the
    prompt tokens that it added, one more per request."""

    def __init__(self, clock: Clock, changed: Callable[[Endpoint, int], None]) -> None:
        super().__init__(clock)
        self._changed = changed

    def enter(self, exchange: Exchange) -> None:
        known = exchange in self._charges
        super().enter(exchange)
        charge = self._charges.get(exchange)
        if charge is not None and not known:
            self._changed(exchange.endpoint, charge.prefill + 1)

    def first_byte(self, exchange: Exchange) -> None:
        super().first_byte(exchange)
        self._changed(exchange.endpoint, 0)

    def leave(self, exchange: Exchange) -> None:
        super().leave(exchange)
        self._changed(exchange.endpoint, 0)


def _uncached(exchange: Exchange) -> int:
    request = exchange.request
    prompt = request.state.read(TOKENIZED_PROMPT) or request.prompt
    match = request.state.read(PREFIX_MATCH)
    return uncached_tokens(match, prompt.tokens, (exchange.endpoint,))[0]


def _log_sum(one: float, other: float) -> float:
    """log(exp(one) + exp(other)); `other` is finite."""
    high, low = (one, other) if one > other else (other, one)
    return high + math.log1p(math.exp(low - high))
