"""Costs of splitting a request between a prefill and a decode pod: the KV transfer, and the prefill share of pods."""

from __future__ import annotations

from math import exp, expm1

from proxy.core.endpoint import Endpoint
from proxy.latency.rates import TOKEN_SCALE
from proxy.latency.regression import Regression

TRANSFER_MEMORY, TRANSFER_PRIOR_WEIGHT = 0.98, 4.0
ALLOWANCE = 0.005
"""Error in seconds that even the shortest transfer may have."""

PREFILL_MEMORY = 10.0
"""Time constant of the prefill share, in seconds."""

SHORTEST = 1.0
"""Shortest period that a share refers to, in seconds; a single prompt would fill a shorter one."""

MOST = 0.9
"""Largest share: responses progress even on a pod that always computes prompts."""


class TransferModel:
    """Predicts the duration of a KV transfer between two pods, from a fixed time and a time per token. Learned from all
    pairs of pods together. Lives as long as its plugin."""

    def __init__(self, fixed: float, per_token: float) -> None:
        """The arguments are used before the first observation: seconds, and seconds per token."""
        self._regression = Regression((fixed, per_token / TOKEN_SCALE, 0.0), TRANSFER_MEMORY, TRANSFER_PRIOR_WEIGHT)

    def seconds(self, tokens: float) -> float:
        return self._regression.predict((1.0, tokens * TOKEN_SCALE, 0.0))

    def observe(self, tokens: float, seconds: float) -> None:
        self._regression.observe((1.0, tokens * TOKEN_SCALE, 0.0), seconds, ALLOWANCE)


class PrefillShare:
    """The share of their recent time that pods spent on prompts. It slows down the responses that run there. Lives as
    long as its plugin."""

    def __init__(self) -> None:
        self._worked: dict[Endpoint, tuple[float, float]] = {}
        """By pod: the time of the last prompt, and the decayed seconds of work until then."""
        self._since: dict[Endpoint, float] = {}
        """When a pod was first seen; its earlier work is not known."""

    def add(self, endpoint: Endpoint, seconds: float, now: float) -> None:
        """Count the work of a prompt that this proxy sends. Prompts of other proxies are assumed to be like these."""
        self._since.setdefault(endpoint, now)
        load = endpoint.load
        ours = max(1, load.requests - load.remote_requests)
        self._worked[endpoint] = now, self._left(endpoint, now) + seconds * max(1.0, load.requests / ours)

    def of(self, endpoint: Endpoint, now: float) -> float:
        """Return the share, from 0 to `MOST`."""
        seen = max(SHORTEST, now - self._since.setdefault(endpoint, now))
        return min(MOST, self._left(endpoint, now) / (PREFILL_MEMORY * -expm1(-seen / PREFILL_MEMORY)))

    def forget(self, endpoint: Endpoint) -> None:
        self._worked.pop(endpoint, None)
        self._since.pop(endpoint, None)

    def _left(self, endpoint: Endpoint, now: float) -> float:
        at, seconds = self._worked.get(endpoint, (now, 0.0))
        return seconds * exp((at - now) / PREFILL_MEMORY)
