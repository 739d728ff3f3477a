"""Every extension point, on one page.

A plugin is a dataclass with the decorator `@plugin("its-type")`; its fields are its YAML parameters, those typed as a
port of `core.ports` are injected. Filters, scorers and pickers change nothing observable: they run once per profile,
shadow, retry and dry run, scorers once more where one of them is at fault. State moves in PreRequest and PostResponse.
Plugins see endpoints as a tuple. Nothing that a plugin returns or raises breaks another plugin or the request: its
faults are counted, logged once a minute, and replaced by a default.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision, ProfileResult, ProfileRun, ScoredEndpoint, scored_endpoints
from proxy.core.endpoint import Endpoint
from proxy.core.request import DataKey, InferenceRequest

P = TypeVar("P", bound="type[Plugin]")


def plugin(type_name: str) -> Callable[[P], P]:
    """Names the type under which a class is configured; the registry finds it by looking through its module."""

    def mark(cls: P) -> P:
        cls.plugin_type = type_name
        return cls

    return mark


class Plugin(Protocol):
    """What all plugins have in common. Keys are checked and producers ordered at start-up."""

    __slots__ = ()
    plugin_type: ClassVar[str] = ""
    uses: ClassVar[tuple[DataKey[Any], ...]] = ()
    """Data that the plugin reads where there is a producer of them, and can do without."""

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return ()

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        """Data whose absence makes the plugin useless: a configuration without a provider of it is refused, or gets
        the default provider injected where there is one."""
        return ()


class DataProducer(Plugin, Protocol):
    """Writes what it `provides` into `request.state`; the only plugin that may wait."""

    __slots__ = ()
    waits: ClassVar[bool] = True
    """False promises that `produce` never suspends, which spares the deadline's timer. Such a producer may override
    `derive` in place of `produce`."""
    takes: ClassVar[float] = 0.0
    """Seconds that `produce` means to take, beyond those that all producers have together."""

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        self.derive(request, endpoints)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        """As `produce`, without waiting."""
        return


class Filter(Plugin, Protocol):
    """Keeps a subset of the endpoints, in their order, or raises a RequestError to refuse the request.

    A filter that raises anything else is skipped."""

    __slots__ = ()
    exhausts: ClassVar[bool] = False
    """True if what this filter removes is busy rather than unfit: then an emptied list is a 429, not a 503."""

    @property
    def spares(self) -> int:
        """Of so many endpoints, or fewer, it keeps all: it need not be asked."""
        return 0

    def filter(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]
    ) -> Sequence[Endpoint]: ...


class Scorer(Plugin, Protocol):
    """One score in [0, 1] per endpoint, in their order; 1 is best."""

    __slots__ = ()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]: ...


class Picker(Plugin, Protocol):
    """Scored endpoints, best first; handed at least one. A picker that raises or picks none: the best score wins."""

    __slots__ = ()

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> Sequence[ScoredEndpoint]: ...

    def order(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        """What `pick` says, where nobody wants the scores: a picker that needs no objects for them says it for less."""
        picked = self.pick(run, request, tuple(scored_endpoints(zip(endpoints, scores, strict=True))))
        return [endpoint for endpoint, _ in picked]


class ProfileHandler(Plugin, Protocol):
    """Yields the name of a profile, is sent its result (or thrown its error), and returns the decision.

    A RequestError that it raises is the response to the client; after any other error the default profile decides."""

    __slots__ = ()

    def only_profile(self) -> str | None:
        """Asked at start-up: the profile whose result is always the decision, so that nothing is left to discuss."""
        return None

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]: ...


class Decider(Plugin, Protocol):
    """Whether a stage of a request runs on a pod of its own. A profile handler asks; changes nothing observable."""

    __slots__ = ()

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        """Before anybody looks for such a pod; `decode` is the one that would do without it."""

    def confirms(self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]) -> bool:
        """Once it is known who would do it, best first."""
        return True


@runtime_checkable
class PairDecider(Decider, Protocol):
    """Compares the best pod that would do all of it with the best two that would share it: pods that are good at one
    stage need not be good at all of it. So the profile of who answers runs twice."""

    def pricing(self, request: InferenceRequest, stage: Stage) -> AbstractContextManager[None]:
        """Around the run of the profile of a stage, PREFILL or DECODE: scorers are told what only that costs where."""

    def prefers(
        self, request: InferenceRequest, whole: Endpoint, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> bool:
        """In place of `confirms`: whether `decode` and the first of `prefill` are better than `whole` alone."""


class PreRequest(Plugin, Protocol):
    """Runs in the tick of the decision, before the leg is sent."""

    __slots__ = ()

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None: ...


class PostResponse(Plugin, Protocol):
    """Runs exactly once per leg that had a PreRequest, however it ended."""

    __slots__ = ()

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None: ...


class EndpointRemoved(Plugin, Protocol):
    """Told when a pod is gone, or came back without its memory: forget it."""

    __slots__ = ()

    def endpoint_removed(self, endpoint: Endpoint) -> None: ...


EXTENSION_POINTS: tuple[type[Plugin], ...] = (
    ProfileHandler,
    Decider,
    DataProducer,
    Filter,
    Scorer,
    Picker,
    PreRequest,
    PostResponse,
    EndpointRemoved,
)


def points_of(cls: type) -> tuple[type[Plugin], ...]:
    """The extension points a class declares as its bases."""
    return tuple(point for point in EXTENSION_POINTS if point in cls.__mro__)
