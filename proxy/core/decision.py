"""What scheduling returns: ranked endpoints per profile, and the decision made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from proxy.core.endpoint import Endpoint
from proxy.core.request import frozen


@frozen
class ProfileRun:
    """Which run of a profile this is; handed to every filter, scorer and picker."""

    profile: str
    attempt: int = 0
    shadow: bool = False


class ScoredEndpoint(NamedTuple):
    endpoint: Endpoint
    score: float


class ProfileResult(NamedTuple):
    """Every scored survivor of one profile run, best first, never empty."""

    profile: str
    ranked: tuple[ScoredEndpoint, ...]

    @property
    def best(self) -> Endpoint:
        return self.ranked[0].endpoint

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Best first."""
        return tuple(map(_endpoint, self.ranked))


SPLIT = "split"


class Decision(NamedTuple):
    """Where a request goes. `fallbacks` are the other survivors of the target's profile, in rank order.

    `prefill` are pods, best first, one of which computes the prompt before the target answers, `encode` those that
    compute the embeddings of its media before that; empty: the target does it itself. `why` is SPLIT, or says why a
    stage that is configured was left out; empty where there are no stages.
    """

    target: Endpoint
    fallbacks: tuple[Endpoint, ...] = ()
    profile: str = ""
    prefill: tuple[Endpoint, ...] = ()
    encode: tuple[Endpoint, ...] = ()
    why: str = ""
    shadows: tuple[ProfileResult, ...] = ()
    """What the shadow profiles that ran beside it would have ranked."""

    @classmethod
    def from_result(cls, result: ProfileResult) -> Decision:
        return decided(result.profile, result.endpoints)

    def candidates(self) -> Sequence[Endpoint]:
        """Target first, then the fallbacks."""
        return (self.target, *self.fallbacks)


# Made of tuples of their fields, without the Python frame that their own constructors take for every pod and request.
scored_endpoints: Callable[[Iterable[tuple[Endpoint, float]]], Iterator[ScoredEndpoint]] = partial(
    map, tuple.__new__, repeat(ScoredEndpoint)
)
_decision = partial(tuple.__new__, Decision)
_endpoint = itemgetter(0)


def decided(profile: str, ranked: Sequence[Endpoint]) -> Decision:
    """Of what a profile ranked, for the first of it."""
    return _decision((ranked[0], tuple(ranked[1:]), profile, (), (), "", ()))
