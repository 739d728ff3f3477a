"""The record of one decision: what each plugin returned, profile by profile, and how long each call took."""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, repeat
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from proxy.core.decision import ProfileRun, ScoredEndpoint
    from proxy.core.endpoint import Endpoint
    from proxy.core.plugin import Plugin
    from proxy.core.request import InferenceRequest

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
