"""Every extension point, on one page.

A plugin is a dataclass with the decorator `@plugin("its-type")`; its fields are its YAML parameters, those typed as a
port of `core.ports` are injected. Filters, scorers and pickers change nothing observable: they run once per profile,
shadow, retry and dry run. State changes in PreRequest and PostResponse, except that `derive` of a producer may note
which prompts have been computed, and that a model may learn from what has been observed when it is read. Plugins see
endpoints as a tuple. Nothing that a plugin returns or raises breaks another plugin or the request: its faults are
counted, logged once a minute, and replaced by a default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision, ProfileResult, ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.request import DataKey, InferenceRequest

P = TypeVar("P", bound="type[Plugin]")


def plugin(type_name: str) -> Callable[[P], P]:
    """Name the type under which a class is configured. The registry finds the class in its module."""

    def mark(cls: P) -> P:
        cls.plugin_type = type_name
        return cls

    return mark


def reads(key: DataKey[Any], parameter: str, doc: str, *, if_named: bool = False) -> Any:
    """Declare a field with a key that the plugin requires, bound to the producer that the YAML key `parameter` names.
    With `if_named` the key is required only if a producer is named."""
    metadata = {"doc": doc, "key": parameter, "reads": key, "if_named": if_named}
    return dataclasses.field(default_factory=lambda: key, metadata=metadata)


@cache
def _reads(cls: type[Plugin]) -> list[tuple[str, bool]]:
    """Return the names of the fields declared with `reads`, each with its `if_named`."""
    fields: dict[str, dataclasses.Field[Any]] = getattr(cls, "__dataclass_fields__", {})
    return [(name, field.metadata["if_named"]) for name, field in fields.items() if "reads" in field.metadata]


class Plugin(Protocol):
    """The base of all plugins. Data keys are checked and producers ordered at start-up."""

    __slots__ = ()
    plugin_type: ClassVar[str] = ""
    uses: ClassVar[tuple[DataKey[Any], ...]] = ()
    """Data that the plugin reads if a producer exists."""

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return ()

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        """Data that the plugin needs: by default, the keys of the fields declared with `reads`. A configuration without
        a producer is refused, or gets the default producer if there is one."""
        keys = [(getattr(self, name), if_named) for name, if_named in _reads(type(self))]
        return tuple(key for key, if_named in keys if key.producer or not if_named)


class DataProducer(Plugin, Protocol):
    """Writes the data that it `provides` into `request.state`. No other plugin may wait."""

    __slots__ = ()
    waits: ClassVar[bool] = True
    """False declares that `produce` never suspends, which saves the timer of the deadline. Such a producer may override
    `derive` instead of `produce`."""
    takes: ClassVar[float] = 0.0
    """Seconds that `produce` may take in addition to the common deadline of all producers."""

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        self.derive(request, endpoints)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        """As `produce`, without waiting."""
        return


class Filter(Plugin, Protocol):
    """Keeps a subset of the endpoints, or raises a RequestError to refuse the request.

    A filter that raises anything else is skipped."""

    __slots__ = ()
    exhausts: ClassVar[bool] = False
    """True if the removed endpoints are busy rather than unsuitable: an empty result is then a 429 instead of a 503."""

    @property
    def keeps_up_to(self) -> int:
        """A number of endpoints. For this many or fewer the filter would keep all, so it need not be called. Read at
        start-up."""
        return 0

    def filter(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]
    ) -> Sequence[Endpoint]: ...


class Scorer(Plugin, Protocol):
    """Returns one score in [0, 1] per endpoint, in their order; 1 is best."""

    __slots__ = ()

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]: ...


class Picker(Plugin, Protocol):
    """Orders scored endpoints, best first; there is at least one. If a picker raises or returns none, the best score
    wins."""

    __slots__ = ()

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> Sequence[ScoredEndpoint]: ...

    def order(
        self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint], scores: Sequence[float]
    ) -> Sequence[Endpoint]:
        """As `pick`, for callers that need no scores: faster for pickers that create no objects for them."""
        picked = self.pick(run, request, tuple(map(ScoredEndpoint, endpoints, scores)))
        return [endpoint for endpoint, _ in picked]


class ProfileHandler(Plugin, Protocol):
    """Yields the name of a profile, is sent its result (or thrown its error), and returns the decision.

    A RequestError that it raises is the response to the client; after any other error the default profile decides."""

    __slots__ = ()

    def only_profile(self) -> str | None:
        """The profile whose result is always the decision, or None. Read at start-up."""
        return None

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]: ...


class Decider(Plugin, Protocol):
    """Decides for a profile handler whether a stage of a request runs on a pod of its own. Changes nothing
    observable."""

    __slots__ = ()

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        """Return whether to look for a pod for the stage; `decode` is the pod that would otherwise run it."""

    def confirms(self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]) -> bool:
        """Return whether to use the pods that were found, best first."""
        return True


@runtime_checkable
class PairDecider(Decider, Protocol):
    """Compares the best single pod with the best pair of pods. Pods that are good at one stage may be bad at the whole
    request, so the profile of the responding pod runs twice."""

    def pricing(self, request: InferenceRequest, stage: Stage) -> AbstractContextManager[None]:
        """Surround the run of the profile of a stage, PREFILL or DECODE, in which scorers price this stage alone."""

    def prefers(
        self, request: InferenceRequest, whole: Endpoint, decode: Endpoint, prefill: Sequence[Endpoint]
    ) -> bool:
        """Replaces `confirms`: return whether `decode` with the first of `prefill` is better than `whole` alone."""


class PreRequest(Plugin, Protocol):
    """Runs in the event-loop tick of the decision, before the attempt is sent."""

    __slots__ = ()

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None: ...


class PostResponse(Plugin, Protocol):
    """Runs exactly once per attempt that had a PreRequest, however it ended."""

    __slots__ = ()

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None: ...


class EndpointRemoved(Plugin, Protocol):
    """Called when a pod was removed, or restarted without its cache, so that the plugin drops its state."""

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


REQUIRED_METHODS = {
    "ProfileHandler": "plan",
    "Decider": "wants",
    "Filter": "filter",
    "Scorer": "score",
    "Picker": "pick",
    "PreRequest": "pre_request",
    "PostResponse": "post_response",
    "EndpointRemoved": "endpoint_removed",
}
"""The method that a plugin with this extension point needs. A DataProducer has `produce` or `derive`."""


def points_of(cls: type) -> tuple[type[Plugin], ...]:
    """Return the extension points that a class has as bases."""
    return tuple(point for point in EXTENSION_POINTS if point in cls.__mro__)
