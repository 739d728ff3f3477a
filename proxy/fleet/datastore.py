"""The living endpoints: who is there, who may be asked for what, and what happens when one comes or goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.endpoint import ROLE_LABEL, Endpoint, EndpointState
from proxy.core.ports import Clock
from proxy.fleet.scrape import Card
from proxy.fleet.serving import Serving
from proxy.fleet.settings import PodSettings

log = logging.getLogger(__name__)

Hook = Callable[[Endpoint], None]


def _nothing(endpoint: Endpoint) -> None:
    pass


@dataclass(slots=True, eq=False)
class _Member:
    """An endpoint and what only the fleet knows of it. Lives as long as the endpoint.

    `contact` is starting, ready or ejected, whatever an operator wants; `leave_by` is set while it is being removed.
    """

    endpoint: Endpoint
    pod: PodSettings
    source: str
    contact: EndpointState = EndpointState.STARTING
    draining: bool = False
    leave_by: float | None = None
    cards: Sequence[Card] = ()


class Fleet:
    """Hooks are called in the tick of the change. One that fails is logged; the change stands.

    on_ready      a pod answered, for the first time or again after it refused
    on_restarted  a pod lost its memory: forget what was known of its caches
    on_removed    a pod is gone for good: forget it
    on_missed     a scrape of a pod came to nothing

    A removed pod gets no new requests, and goes when its last one ends or `grace` seconds have passed.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        on_ready: Hook = _nothing,
        on_restarted: Hook = _nothing,
        on_removed: Hook = _nothing,
        on_missed: Hook = _nothing,
        grace: float = 120.0,
    ) -> None:
        self._clock = clock
        self._on_ready = on_ready
        self._on_restarted = on_restarted
        self._on_removed = on_removed
        self._on_missed = on_missed
        self._grace = grace
        self._members: dict[str, _Member] = {}
        self._known: set[str] = set()
        self._watchers: list[tuple[Hook, Hook]] = []
        self._serving: Serving | None = None

    # What the data path asks.

    def serving(self, model: str) -> Sequence[Endpoint]:
        """The ready endpoints that serve the model; O(1)."""
        return (self._serving or self._renew()).of(model)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return (self._serving or self._renew()).ready

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """All of them, in any state."""
        return [member.endpoint for member in self._members.values()]

    def get(self, name: str) -> Endpoint | None:
        member = self._members.get(name)
        return member.endpoint if member else None

    def knows(self, model: str) -> bool:
        """False if no pod ever named the model, though they have spoken, and each that is there names its models."""
        return not self._known or model in self._known or any(_takes_any(m) for m in self._members.values())

    def only_model(self) -> str | None:
        """The one model there is, LoRA adapters and further names of it aside; None if there are more, or none that is
        named."""
        adapters = {card["id"] for member in self._members.values() for card in member.cards if card.get("parent")}
        models = {model for member in self._members.values() for model in _first_names(member)} - adapters
        return models.pop() if len(models) == 1 else None

    def models(self) -> list[dict[str, Any]]:
        """Cards of the models that ready pods serve, as the first pod by name gives them."""
        merged: dict[str, dict[str, Any]] = {}
        members = sorted(self._members.values(), key=lambda member: member.endpoint.name)
        for member in members:
            if member.endpoint.state is EndpointState.READY:
                for card in _cards(member):
                    merged.setdefault(card["id"], dict(card))
        return list(merged.values())

    # What operators and discovery want.

    def add(self, pod: PodSettings, source: str = "operator") -> Endpoint:
        """A new endpoint; or the one of this name, brought up to date, and kept if it was about to leave."""
        member = self._members.get(pod.name)
        if member is None:
            return self._join(pod, source)
        member.source, member.leave_by = source, None
        self._update(member, pod)
        return member.endpoint

    def remove(self, name: str) -> None:
        """Raises KeyError for a name nobody has."""
        self._leave(self._members[name])
        self.sweep()

    def drain(self, name: str) -> None:
        """No new requests, until `undrain`. Raises KeyError for a name nobody has."""
        self._set_draining(self._members[name], True)

    def undrain(self, name: str) -> None:
        """Raises KeyError for a name nobody has."""
        self._set_draining(self._members[name], False)

    def reconcile(self, source: str, desired: Sequence[PodSettings]) -> None:
        """Makes the pods of this source those desired: adds, updates, removes, by name."""
        wanted = {pod.name for pod in desired}
        for name, member in self._members.items():
            if member.source == source and name not in wanted:
                self._leave(member)
        self.sweep()
        for pod in desired:
            other = self._members.get(pod.name)
            if other and other.leave_by is None and other.source != source:
                log.warning("pod %s of %s is left out: %s has one of this name", pod.name, source, other.source)
            else:
                self.add(pod, source)

    def sweep(self) -> None:
        """Lets go of the removed pods whose last request has ended."""
        now = self._clock.now()
        for member in list(self._members.values()):
            if member.leave_by is not None and (member.endpoint.load.requests <= 0 or now >= member.leave_by):
                self._drop(member)

    def watch(self, added: Hook, removed: Hook) -> Callable[[], None]:
        """Calls `added` for every endpoint there is and that comes, `removed` for those that go; until the function
        that it returns is called."""
        watcher = (added, removed)
        self._watchers.append(watcher)
        for endpoint in self.endpoints:
            added(endpoint)
        return lambda: self._watchers.remove(watcher)

    # What the refresh loops report; of an endpoint that is gone nothing is taken.

    def missed(self, endpoint: Endpoint) -> None:
        """A scrape of it failed."""
        if self._member_of(endpoint):
            self._call(self._on_missed, endpoint)

    def reached(self, endpoint: Endpoint) -> None:
        """It answers: starting or ejected -> ready."""
        if member := self._member_of(endpoint):
            member.contact = EndpointState.READY
            self._settle(member)
            self._call(self._on_ready, endpoint)

    def refused(self, endpoint: Endpoint) -> None:
        """Nobody listens on its port: ready -> ejected."""
        if member := self._member_of(endpoint):
            member.contact = EndpointState.EJECTED
            self._settle(member)

    def restarted(self, endpoint: Endpoint) -> None:
        """It came back without its caches."""
        if self._member_of(endpoint):
            self._call(self._on_restarted, endpoint)

    def refreshed(self, endpoint: Endpoint) -> None:
        """It has metrics that it did not have before."""

    def listed(self, endpoint: Endpoint, cards: Sequence[Card] | None) -> None:
        """It says which models it serves; None: it cannot say."""
        if member := self._member_of(endpoint):
            member.cards = cards or ()
            self._name_models(member)

    # Below: how.

    def _join(self, pod: PodSettings, source: str) -> Endpoint:
        endpoint = Endpoint(pod.name)
        member = self._members[pod.name] = _Member(endpoint, pod, source)
        self._update(member, pod)
        for added, _ in self._watchers:
            self._call(added, endpoint)
        return endpoint

    def _update(self, member: _Member, pod: PodSettings) -> None:
        endpoint = member.endpoint
        member.pod = pod
        endpoint.url = pod.url
        endpoint.role = pod.role or pod.labels.get(ROLE_LABEL, "")
        endpoint.labels = {ROLE_LABEL: endpoint.role, **pod.labels} if endpoint.role else pod.labels
        endpoint.weight = pod.weight
        endpoint.engine = pod.engine
        endpoint.api_key = pod.api_key
        self._name_models(member)
        self._settle(member)

    def _name_models(self, member: _Member) -> None:
        models = frozenset(member.pod.models or [card["id"] for card in member.cards]) or None
        if models != member.endpoint.models:
            member.endpoint.models = models
            self._serving = None
        self._known |= models or set()

    def _set_draining(self, member: _Member, draining: bool) -> None:
        member.draining = draining
        self._settle(member)

    def _leave(self, member: _Member) -> None:
        if member.leave_by is None:
            member.leave_by = self._clock.now() + self._grace
            self._settle(member)

    def _drop(self, member: _Member) -> None:
        endpoint = member.endpoint
        del self._members[endpoint.name]
        self._serving = None
        for hook in (self._on_removed, *(removed for _, removed in self._watchers)):
            self._call(hook, endpoint)

    def _settle(self, member: _Member) -> None:
        leaving = member.draining or member.leave_by is not None
        state = EndpointState.DRAINING if leaving else member.contact
        if state is not member.endpoint.state:
            self._announce(member.endpoint, state)
            member.endpoint.state = state
            self._serving = None

    def _announce(self, endpoint: Endpoint, state: EndpointState) -> None:
        log.info("pod %s: %s -> %s", endpoint.name, endpoint.state.value, state.value)

    def _renew(self) -> Serving:
        self._serving = Serving(self.endpoints)
        return self._serving

    def _member_of(self, endpoint: Endpoint) -> _Member | None:
        member = self._members.get(endpoint.name)
        return member if member and member.endpoint is endpoint else None

    def _call(self, hook: Hook, endpoint: Endpoint) -> None:
        try:
            hook(endpoint)
        except Exception:
            log.exception("a hook failed for pod %s", endpoint.name)


def _takes_any(member: _Member) -> bool:
    return not member.endpoint.models and member.contact is not EndpointState.STARTING


def _first_names(member: _Member) -> Iterable[str]:
    """A pod that serves one model under several names says so by their `root`."""
    names: dict[str, str] = {}
    for card in _cards(member):
        names.setdefault(str(card.get("root") or card["id"]), card["id"])
    return names.values()


def _cards(member: _Member) -> Sequence[Card]:
    """The pod's own, as far as its configuration lets it serve them, and bare ones for what it does not list."""
    configured = member.pod.models
    if not configured:
        return member.cards
    own = {card["id"]: card for card in member.cards}
    return [own.get(model) or {"id": model, "object": "model"} for model in configured]
