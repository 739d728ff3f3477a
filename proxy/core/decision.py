"""The result of scheduling: the ranked endpoints of each profile, the decision, and the record of how it was made."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
    """The name of the profile that runs, and whether it is a shadow; passed to every filter, scorer and picker."""

    profile: str
    shadow: bool = False


class ScoredEndpoint(NamedTuple):
    endpoint: Endpoint
    score: float


class ProfileResult(NamedTuple):
    """The scored endpoints that passed the filters of one profile run, best first; at least one."""

    profile: str
    ranked: tuple[ScoredEndpoint, ...]

    @property
    def best(self) -> Endpoint:
        return self.ranked[0].endpoint

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints, best first."""
        return tuple(map(_ENDPOINT, self.ranked))


_ENDPOINT, _SCORE = itemgetter(0), itemgetter(1)

SPLIT = "split"


class Decision(NamedTuple):
    """Where a request goes. `fallbacks` are the other endpoints of the target's profile, best first. `prefill` are
    pods, best first: one of them computes the prompt before the target responds. `encode` are pods that compute the
    embeddings of its media before that. Empty: the target does it. `split_outcome` is SPLIT or the reason why a
    configured stage was left out; empty without stages."""

    target: Endpoint
    fallbacks: tuple[Endpoint, ...] = ()
    profile: str = ""
    prefill: tuple[Endpoint, ...] = ()
    encode: tuple[Endpoint, ...] = ()
    split_outcome: str = ""
    shadows: tuple[ProfileResult, ...] = ()
    """The rankings of the shadow profiles of the run."""

    @classmethod
    def from_result(cls, result: ProfileResult) -> Decision:
        best, *others = result.endpoints
        return cls(best, tuple(others), result.profile)

    def candidates(self) -> Sequence[Endpoint]:
        """Return the target and its fallbacks, best first: the pods that are left after filters and picker. The
        `candidates` of `Listener.decided` are those before the filters."""
        return (self.target, *self.fallbacks)


T = TypeVar("T")

PluginTimer = Callable[[str, str, str, float], None]
"""Called with the extension point, the type and the name of a plugin, and the seconds of one of its calls."""

EVERY = 64
"""Of this many decisions one is recorded to time the plugins, because recording is slow."""


@dataclass(slots=True)
class ProfileRecord:
    """The last run of one profile. `filters` has the names of the pods that each filter removed; `scores`, by scorer,
    and `totals` are in the order of `scored`, which is empty if no pod was left."""

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
    """Discard the times."""


@dataclass(slots=True, eq=False)
class DecisionRecord:
    """Filled while a decision is made. `is_wanted`: it was requested, and does not only time plugins. `now` returns
    seconds with a resolution of microseconds."""

    timer: PluginTimer = untimed
    now: Callable[[], float] = perf_counter
    is_wanted: bool = False
    profiles: dict[str, ProfileRecord] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[ProfileRecord, ...]:
        """The profile runs, ordered by their first run."""
        return tuple(self.profiles.values())

    def profile(self, run: ProfileRun) -> ProfileRecord:
        return self.profiles.setdefault(run.profile, ProfileRecord(run.profile, run.shadow))

    def call(self, point: str, plugin: Plugin, name: str, method: Callable[..., T], *args: object) -> T:
        """Call the method of a plugin and time it. Return its result or raise its error."""
        started = self.now()
        try:
            return method(*args)
        finally:
            self.timer(point, plugin.plugin_type, name, self.now() - started)

    async def wait(self, point: str, plugin: Plugin, name: str, method: Awaitable[T]) -> T:
        """As `call`, for a coroutine."""
        started = self.now()
        try:
            return await method
        finally:
            self.timer(point, plugin.plugin_type, name, self.now() - started)


class DecisionSampler:
    """Selects the decisions that are recorded: one of every `every`, to time plugins, and the requested ones.
    `timed` yields for each decision in turn whether its plugins are timed; while `wants` is None, `record` is called
    only for these."""

    __slots__ = ("_timer", "timed", "wants")

    def __init__(
        self, timer: PluginTimer = untimed, wants: Callable[[InferenceRequest], bool] | None = None, every: int = EVERY
    ) -> None:
        """`every`: 0 times no plugin."""
        self._timer = timer
        self.wants = wants
        self.timed: Iterator[bool] = cycle([True, *[False] * (every - 1)]) if every else repeat(False)

    def record(self, request: InferenceRequest, is_timed: bool) -> DecisionRecord | None:
        is_wanted = self.wants is not None and self.wants(request)
        if not (is_wanted or is_timed):
            return None
        return DecisionRecord(self._timer if is_timed else untimed, is_wanted=is_wanted)


NO_SAMPLER = DecisionSampler(every=0)
