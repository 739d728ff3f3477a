"""Which pod keeps what: the bindings of sessions and of responses that `/v1/responses` stores, and the successor of a
draining pod for requests with a prefix that it caches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import GONE, Endpoint
from proxy.core.errors import NO_POD, NoEndpoints, UnknownResponse
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.request import InferenceRequest
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch

MOST_BINDINGS = 100_000


def _ignored(key: bytes, endpoint: Endpoint) -> None:
    pass


class BindingTable:
    """The pod of each session or stored response, ordered by last use, the oldest first. Times are monotonic seconds.
    `on_bind(key, endpoint)` is called for every binding that is made or confirmed here; `receive` applies it in other
    processes."""

    def __init__(self, ttl: float, sweep_every: float, most: int = MOST_BINDINGS) -> None:
        self.ttl = ttl
        self.sweep_every = sweep_every
        self._most = most
        self._swept_at = 0.0
        self._bound: OrderedDict[bytes, tuple[Endpoint, float]] = OrderedDict()
        self.on_bind: Callable[[bytes, Endpoint], None] = _ignored

    def __len__(self) -> int:
        return len(self._bound)

    @property
    def is_shared(self) -> bool:
        """Whether other processes make bindings too."""
        return self.on_bind is not _ignored

    def expire_after(self, ttl: float, sweep_every: float) -> None:
        """Apply other settings: sessions expire `ttl` seconds after their last use."""
        self.ttl, self.sweep_every = ttl, sweep_every

    def get(self, id: str, now: float) -> Endpoint | None:
        endpoint, used_at = self._bound.get(_digest(id), (None, 0.0))
        return endpoint if now - used_at < self.ttl else None

    def bind(self, id: str, endpoint: Endpoint, now: float) -> None:
        """Make or confirm a binding."""
        key = _digest(id)
        self._put(key, endpoint, now)
        if now - self._swept_at >= self.sweep_every:
            self._sweep(now)
        self.on_bind(key, endpoint)

    def receive(self, key: bytes, endpoint: Endpoint, used_at: float) -> None:
        """Store a binding of another process, unless a later one is known."""
        if used_at >= self._bound.get(key, (None, used_at))[1]:
            self._put(key, endpoint, used_at)

    def recent(self, most: int) -> Iterator[tuple[bytes, Endpoint, float]]:
        """Return a copy of the most recently used bindings, the most recent last."""
        first = max(0, len(self._bound) - most)
        return iter([(key, endpoint, at) for key, (endpoint, at) in islice(self._bound.items(), first, None)])

    def forget(self, endpoint: Endpoint) -> None:
        for key in [key for key, (bound, _) in self._bound.items() if bound is endpoint]:
            del self._bound[key]

    def move(self, endpoint: Endpoint, successor: Endpoint) -> None:
        for key, (bound, used_at) in self._bound.items():
            if bound is endpoint:
                self._bound[key] = (successor, used_at)

    def _put(self, key: bytes, endpoint: Endpoint, used_at: float) -> None:
        self._bound[key] = (endpoint, used_at)
        self._bound.move_to_end(key)
        if len(self._bound) > self._most:
            self._bound.popitem(last=False)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        while self._bound and now - next(iter(self._bound.values()))[1] >= self.ttl:
            self._bound.popitem(last=False)


def _digest(id: str) -> bytes:
    """Return a digest of an id. Clients choose ids, up to the size of a header, so storing them could fill the
    memory."""
    return blake2b(id.encode("utf-8", "surrogateescape"), digest_size=16).digest()


class Bindings(Listener):
    """The pods of stored responses, by response id, for `ttl` seconds after the last use. What follows a response must
    reach the pod that stores it."""

    def __init__(self, clock: Clock, limit: int = MOST_BINDINGS, ttl: float = 3600.0) -> None:
        self._clock = clock
        self.table = BindingTable(ttl, 0.0, limit)
        self.forget = self.table.forget
        """Drop a pod that was removed or restarted."""

    def bind(self, response_id: str, endpoint: Endpoint) -> None:
        self.table.bind(response_id, endpoint, self._clock.now())

    def response_stored(self, attempt: Attempt, error: BaseException | None) -> None:
        """Bind the response that the pod stores."""
        if attempt.response_id and attempt.endpoint.state is not GONE:
            self.bind(attempt.response_id, attempt.endpoint)

    def find(self, response_id: str) -> Endpoint | None:
        """Return None for an unknown or expired id, or if its pod is gone."""
        endpoint = self.table.get(response_id, self._clock.now())
        if endpoint is not None:
            self.bind(response_id, endpoint)
        return endpoint

    def may_appear(self, response_id: str, ready: Sequence[Endpoint]) -> bool:
        """Return whether the response is unknown here, but may be one that another process has just relayed."""
        return self.table.is_shared and len(ready) > 1 and self.table.get(response_id, self._clock.now()) is None

    def pod_of(self, response_id: str, ready: Sequence[Endpoint]) -> Endpoint:
        """Return the pod that stores the response. Raise UnknownResponse, or NoEndpoints while no pod is ready."""
        endpoint = self.find(response_id)
        if endpoint is not None:
            return endpoint
        if len(ready) == 1:
            return ready[0]
        raise UnknownResponse(response_id) if ready else NoEndpoints(NO_POD)


PREFILL_RATE = 10_000.0
"""Approximate prompt tokens that a pod computes per second, which converts a prefix into seconds."""

REQUEST_TOKENS = 512
"""Tokens that one running or waiting request counts as, without a prediction."""


def steer(request: InferenceRequest, decision: Decision, draining: Sequence[Endpoint]) -> Decision:
    """Return the decision, or the same with another of its candidates first. Called only while pods drain.

    A request whose prefix a draining pod has, and the chosen one has not, goes to the candidate that has most of it, or
    is just computing it, unless that one is behind by more than what it has is worth. What this request itself saves is
    already in its scores. This serves later requests: with the prefix on two pods, each would have it for half of them.
    """
    match = request.state.read(PREFIX_MATCH)
    if match is None or not match.total:
        return decision
    pods, target = decision.candidates(), decision.target
    held = dict(zip(pods, match.matched(pods), strict=True))
    successor = max(pods, key=held.__getitem__)
    saved = (min(held[successor], max(match.matched(draining))) - held[target]) * match.block_size
    if saved <= 0 or not _is_near(request, match, successor, target, saved):
        return decision
    return decision._replace(target=successor, fallbacks=tuple(pod for pod in pods if pod is not successor))


def _is_near(request: InferenceRequest, match: PrefixMatch, successor: Endpoint, target: Endpoint, tokens: int) -> bool:
    """Return whether the successor is behind the target by at most the time of this many prompt tokens."""
    forecast = request.state.read(LATENCY)
    if forecast is not None:
        its, chosen = forecast.costs((successor, target))
        return its - chosen <= tokens / PREFILL_RATE
    prompt = (request.state.read(TOKENIZED_PROMPT) or request.prompt).tokens
    its, chosen = (
        pod.load.tokens + missing + REQUEST_TOKENS * (pod.view.waiting + pod.view.running)
        for pod, missing in zip((successor, target), match.missing((successor, target), prompt), strict=True)
    )
    return its - chosen <= tokens
