"""What scheduling returns: ranked endpoints per profile, the decision made of them, and the record of how."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, repeat
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from proxy.core.endpoint import Endpoint
from proxy.core.request import frozen

if TYPE_CHECKING:
    from proxy.core.plugin import Plugin
    from proxy.core.request import InferenceRequest


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


T = TypeVar("T")

Took = Callable[[str, str, str, float], None]
"""Called with the extension point, the type of the plugin, its name and the seconds that one call of it took."""

EVERY = 64
"""Of so many decisions one is recorded to time the plugins: a recorded one takes 60,000 instructions more."""

_ENDPOINT, _SCORE = itemgetter(0), itemgetter(1)


@dataclass(slots=True)
class ProfileRecord:
    """The last run of one profile. `filters` has the names of the pods that each filter removed; `scores`, by scorer,
    and `totals` are in the order of `scored`, which is empty where no pod was left."""

    profile: str
    shadow: bool
    filters: dict[str, list[str]] = field(default_factory=dict)
    scores: dict[str, Sequence[float]] = field(default_factory=dict)
    scored: tuple[Endpoint, ...] = ()
    totals: Sequence[float] = ()
    ranked: tuple[Endpoint, ...] = ()

    def filtered(self, name: str, before: Sequence[Endpoint], kept: Sequence[Endpoint]) -> None:
        stays = set(kept)
        self.filters[name] = [endpoint.name for endpoint in before if endpoint not in stays]

    def picked(self, scored: Sequence[ScoredEndpoint], ranked: Sequence[ScoredEndpoint]) -> None:
        self.scored = tuple(map(_ENDPOINT, scored))
        self.totals = array("d", map(_SCORE, scored))
        self.ranked = tuple(map(_ENDPOINT, ranked))


def untimed(point: str, plugin_type: str, name: str, seconds: float) -> None:
    """Keep no times."""


class DecisionRecord:
    """Filled in while a decision is made. `is_wanted`: it was asked for, and is not only there to time plugins."""

    __slots__ = ("_now", "_took", "is_wanted", "profiles")

    def __init__(self, took: Took = untimed, now: Callable[[], float] = perf_counter, is_wanted: bool = False) -> None:
        """`now` gives seconds of a clock that is fine enough for microseconds."""
        self._took = took
        self._now = now
        self.is_wanted = is_wanted
        self.profiles: dict[str, ProfileRecord] = {}

    @property
    def runs(self) -> tuple[ProfileRecord, ...]:
        """In the order in which the profiles ran first."""
        return tuple(self.profiles.values())

    def profile(self, run: ProfileRun) -> ProfileRecord:
        return self.profiles.setdefault(run.profile, ProfileRecord(run.profile, run.shadow))

    def call(self, point: str, plugin: Plugin, name: str, method: Callable[..., T], *args: object) -> T:
        """Return what the method of a plugin returns, or raise what it raises, and time it."""
        started = self._now()
        try:
            return method(*args)
        finally:
            self._took(point, plugin.plugin_type, name, self._now() - started)

    async def wait(self, point: str, plugin: Plugin, name: str, method: Awaitable[T]) -> T:
        """The same for a method that waits."""
        started = self._now()
        try:
            return await method
        finally:
            self._took(point, plugin.plugin_type, name, self._now() - started)


class Recorder:
    """Chooses the decisions that are recorded: the first of every `every`, to time plugins, and those that are wanted.

    `passes` says of each decision in turn whether it needs not be recorded to time plugins: while `wants` is None,
    `record` is called only for the others."""

    __slots__ = ("_took", "passes", "wants")

    def __init__(
        self, took: Took = untimed, wants: Callable[[InferenceRequest], bool] | None = None, every: int = EVERY
    ) -> None:
        """`every`: 0 times no plugin."""
        self._took = took
        self.wants = wants
        self.passes: Iterator[bool] = cycle([False, *[True] * (every - 1)]) if every else repeat(True)

    def record(self, request: InferenceRequest, passes: bool) -> DecisionRecord | None:
        is_wanted = self.wants is not None and self.wants(request)
        return DecisionRecord(self._took, is_wanted=is_wanted) if is_wanted or not passes else None


NO_RECORDER = Recorder(every=0)
