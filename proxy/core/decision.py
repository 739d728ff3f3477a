"""What scheduling returns: ranked endpoints per profile, and the decision made of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from proxy.core.endpoint import Endpoint
from proxy.core.frozen import frozen


@frozen
class ProfileRun:
    """Which run of a profile this is; handed to every filter, scorer and picker."""

    profile: str
    attempt: int = 0
    shadow: bool = False


class ScoredEndpoint(NamedTuple):
    endpoint: Endpoint
    score: float


@frozen
class ProfileResult:
    """Every scored survivor of one profile run, best first, never empty."""

    profile: str
    ranked: tuple[ScoredEndpoint, ...]

    @property
    def best(self) -> Endpoint:
        return self.ranked[0].endpoint


@frozen
class Decision:
    """Where a request goes. `fallbacks` are the other survivors of the target's profile, in rank order."""

    target: Endpoint
    fallbacks: tuple[Endpoint, ...] = ()
    profile: str = ""

    @classmethod
    def from_result(cls, result: ProfileResult) -> Decision:
        return cls(result.best, tuple(scored.endpoint for scored in result.ranked[1:]), result.profile)

    def candidates(self) -> Iterator[Endpoint]:
        """Target first, then the fallbacks."""
        yield self.target
        yield from self.fallbacks
