"""The fleet's pods: their states, and which ready endpoints serve which model."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.endpoint import DEFAULT_POOL, ROLE_LABEL, Endpoint, EndpointState, Freshness, update
from proxy.core.ports import Clock
from proxy.fleet.models import NamedModels
from proxy.fleet.records import OURS, Doubts, Heirs, Member, SlowStart
from proxy.fleet.scrape import Card
from proxy.fleet.settings import PodSettings

log = logging.getLogger(__name__)

ASLEEP = "asleep"

OPERATOR = "operator"
"""The source of pods that were added through the admin port."""

Hook = Callable[[Endpoint], None]


def _nothing(endpoint: Endpoint) -> None:
    pass


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`static`: by source and pool, the names of the pods that it may have; others leave before a source adds any, so
    that a pod can move from one pool to another. `slow_start` is in seconds."""

    pools: Sequence[str] = (DEFAULT_POOL,)
    static: Mapping[tuple[str, str], Collection[str]] = field(default_factory=dict)
    panic_percent: float = 50.0
    slow_start: float = 0.0
    wakes: bool = False


class Fleet:
    """Hooks are called in the tick of the change. One that fails is logged; the change stands.

    on_ready      a pod answered, for the first time or again after it refused
    on_restarted  a pod lost its memory: forget what was known of its caches
    on_removed    a pod is gone for good: forget it
    on_missed     a scrape of a pod came to nothing
    on_moved      a pod's state is another one
    on_doubts     this process has other doubts about a pod than before
    on_drained    an operator drains a pod, or takes it back
    on_changed    a pod has reported anew, or its state is another one: what can go on may be more

    A removed pod gets no new requests, and goes when its last one ends or `grace` seconds have passed.

    Doubts about pods eject them, until they would take more than `panic_percent` of those that answer: then so many
    failures say more of something else than of the pods, and all of them are asked. Of those that sleep nobody is.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        on_ready: Hook = _nothing,
        on_restarted: Hook = _nothing,
        on_removed: Hook = _nothing,
        on_missed: Hook = _nothing,
        on_moved: Hook = _nothing,
        on_doubts: Hook = _nothing,
        on_drained: Hook = _nothing,
        on_changed: Hook = _nothing,
        slow_start: SlowStart | None = None,
        grace: float = 120.0,
        panic_percent: float = 50.0,
    ) -> None:
        self._settings = FleetSettings(panic_percent=panic_percent)
        self._clock = clock
        self._on_ready = on_ready
        self._on_restarted = on_restarted
        self._on_removed = on_removed
        self._on_missed = on_missed
        self._on_moved = on_moved
        self._on_doubts = on_doubts
        self._on_drained = on_drained
        self._on_changed = on_changed
        self._slow_start = slow_start
        self._grace = grace
        self._members: dict[str, Member] = {}
        self._models = NamedModels(self._members)
        self._doubts = Doubts(self._members, self._settle, panic_percent)
        self._heirs = Heirs(self._leave)
        self._watchers: list[tuple[Hook, Hook]] = []
        self._serving: Serving | None = None
        self._models_changed: asyncio.Future[None] | None = None
        self.wakes = False
        """Whether pods that sleep are woken when they are needed: set by whoever knows."""
        self.draining: Sequence[Endpoint] = ()
        self.pools: Sequence[str] = (DEFAULT_POOL,)
        """That there are; see `form`."""

    @property
    def settings(self) -> FleetSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: FleetSettings) -> None:
        self._settings = settings
        self.wakes = settings.wakes
        self.form(settings.pools)
        for (source, pool), names in settings.static.items():
            known = [one for one in self._members.values() if (one.source, one.endpoint.pool) == (source, pool)]
            self.reconcile(source, [one.pod for one in known if one.pod.name in names], pool)
        if self._slow_start is not None:
            self._slow_start.seconds = settings.slow_start
            self._serving = None
        self._doubts.panic_percent = settings.panic_percent
        self._doubts.reconsider()

    # What the data path asks.

    def serving(self, model: str) -> Sequence[Endpoint]:
        """The ready endpoints that serve the model; O(1)."""
        return (self._serving or self._renew()).of(model)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return (self._serving or self._renew()).ready

    def within(self, pool: str) -> Serving:
        """The ready endpoints of one pool; they are renewed with all others, so whoever asks asks again."""
        serving = self._serving or self._renew()
        return serving.pools.get(pool) or self._renew_within(serving, pool)

    @property
    def serves(self) -> bool:
        """Whether requests make sense: a pod is ready, or would be woken."""
        return bool(self.ready) or (self.wakes and any(member.can_be_woken for member in self._members.values()))

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """All of them, in any state."""
        return [member.endpoint for member in self._members.values()]

    def get(self, name: str) -> Endpoint | None:
        member = self._members.get(name)
        return member.endpoint if member else None

    def knows(self, model: str) -> bool:
        """See NamedModels, here and below."""
        return self._models.knows(model)

    def is_listed(self, model: str) -> bool:
        return self._models.is_listed(model)

    def models_change(self) -> asyncio.Future[None]:
        """Return what is done when a pod lists other models than before; all who wait share it."""
        if self._models_changed is None:
            self._models_changed = asyncio.get_running_loop().create_future()
        return self._models_changed

    def only_model(self) -> str:
        return self._models.only(self.wakes)

    def models(self) -> list[dict[str, Any]]:
        return self._models.cards(self.wakes)

    def is_leaving(self, endpoint: Endpoint) -> bool:
        """Nobody wants it any more; it goes when its last request has ended."""
        member = self._member_of(endpoint)
        return member is None or member.leave_by is not None

    # What operators and discovery want.

    def add(self, pod: PodSettings, source: str = OPERATOR, pool: str = DEFAULT_POOL) -> Endpoint:
        """A new endpoint; or the one of this name, brought up to date, and kept if it was about to leave. If that is in
        another pool, or has another uid, it is gone at once, and a new one begins."""
        member = self._members.get(pod.name)
        if member is not None and (member.endpoint.pool, member.pod.uid) != (pool, pod.uid):
            self._drop(member)
            member = None
        if member is None:
            return self._join(pod, source, pool)
        if source != OPERATOR or member.leave_by is not None:  # what is configured stays so, whoever repeats it
            member.source = source
        member.leave_by = None
        self._heirs.forget(member)
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

    def drains(self, endpoint: Endpoint) -> bool:
        """Whether an operator wants it to."""
        member = self._member_of(endpoint)
        return member is not None and member.draining

    def reconcile(self, source: str, desired: Sequence[PodSettings], pool: str = DEFAULT_POOL) -> None:
        """Makes the pods of this source those desired: adds, updates, removes, by name. Where none of those that stay
        serves yet, the others do so until one does, or `grace` seconds have passed."""
        wanted = {pod.name for pod in desired}
        unwanted = {member for name, member in self._members.items() if member.source == source and name not in wanted}
        for pod in desired:
            other = self._members.get(pod.name)
            if other and other.leave_by is None and other.source != source:
                log.warning("pod %s of %s is left out: %s has one of this name", pod.name, source, other.source)
            else:
                self.add(pod, source, pool)
        self._heirs.replace(unwanted, self._members.values(), self._clock.now() + self._grace)
        self.sweep()

    def form(self, pools: Sequence[str]) -> None:
        """There are these pools, in this order. The pods of others leave, whoever wanted them."""
        self.pools = pools
        for member in self._members.values():
            if member.endpoint.pool not in pools:
                self._leave(member)

    def sweep(self) -> None:
        """Lets go of the removed pods whose last request has ended."""
        now = self._clock.now()
        self._heirs.sweep(now)
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

    # What is known of requests: of an endpoint that is gone nothing is taken.

    def doubt(self, endpoint: Endpoint, why: str) -> None:
        """Rather not, until `trust` takes it back."""
        member = self._member_of(endpoint)
        if member and OURS not in member.doubts.get(why, ()):
            self._doubts.begin(member, why, OURS)
            self._call(self._on_doubts, endpoint)

    def trust(self, endpoint: Endpoint, why: str) -> None:
        member = self._member_of(endpoint)
        if member and OURS in member.doubts.get(why, ()):
            self._doubts.end(member, why, OURS)
            self._call(self._on_doubts, endpoint)

    @property
    def panics(self) -> bool:
        """Whether doubts are ignored, in some pool."""
        return bool(self._doubts.panics)

    def doubts(self, endpoint: Endpoint) -> Sequence[str]:
        """Whoever has them; and whether it sleeps."""
        member = self._member_of(endpoint)
        return sorted([*member.doubts, *[ASLEEP] * member.asleep]) if member else ()

    def own_doubts(self) -> Mapping[str, Sequence[str]]:
        """Those of this process, by the names of the pods about which it has any."""
        return self._doubts.own()

    def doubted_by(self, sibling: int, doubts: Mapping[str, Sequence[str]]) -> None:
        """All that a sibling has against any pod, by the pods' names; nothing if it is gone."""
        self._doubts.hear(sibling, doubts)

    def scrape_age(self, endpoint: Endpoint) -> float | None:
        """Seconds since the last good scrape was sent; None before the first."""
        scraped_at = endpoint.metrics.scraped_at
        return None if scraped_at == -math.inf else self._clock.now() - scraped_at

    def scrape_failure(self, endpoint: Endpoint) -> str | None:
        """Why the last scrape came to nothing; None if it did not, or there was none yet."""
        member = self._member_of(endpoint)
        return member.scrape_failure if member else None

    def lost_at(self, endpoint: Endpoint, sent_at: float) -> float | None:
        """Since when what was sent then need not be waited for: the pod takes no connections, or is another process.
        None: it is there, or nothing is known of it."""
        member = self._member_of(endpoint)
        if member is None:
            return None
        return member.restarted_at if member.restarted_at > sent_at else member.refused_at

    # What the refresh loops report; of an endpoint that is gone nothing is taken.

    def missed(self, endpoint: Endpoint, why: str) -> None:
        """A scrape of it failed."""
        if member := self._member_of(endpoint):
            member.scrape_failure = why
            self._call(self._on_missed, endpoint)

    def reached(self, endpoint: Endpoint) -> None:
        """It answers: starting or ejected -> ready."""
        if member := self._member_of(endpoint):
            member.contact = EndpointState.READY
            self._settle(member)
            self._doubts.reconsider()
            self._call(self._on_ready, endpoint)
            self._heirs.came(member)

    def refused(self, endpoint: Endpoint) -> None:
        """Nobody listens on its port: ready -> ejected."""
        if member := self._member_of(endpoint):
            member.contact = EndpointState.EJECTED
            self._settle(member)
            self._doubts.reconsider()

    def restarted(self, endpoint: Endpoint) -> None:
        """It came back without its caches."""
        if member := self._member_of(endpoint):
            member.restarted_at = self._clock.now()
            self._call(self._on_restarted, endpoint)

    def refreshed(self, endpoint: Endpoint) -> None:
        """It has metrics that it did not have before."""
        member = self._member_of(endpoint)
        if member is not None and endpoint.metrics.freshness is Freshness.FRESH:
            member.scrape_failure = None
        if member is not None and member.asleep is not bool(endpoint.metrics.sleep_level):
            self._turn_over(member)
        self._call(self._on_changed, endpoint)

    def listed(self, endpoint: Endpoint, cards: Sequence[Card] | None) -> None:
        """It says which models it serves; None: it cannot say."""
        if member := self._member_of(endpoint):
            member.cards = cards or ()
            self._name_models(member)

    # Below: how.

    def _join(self, pod: PodSettings, source: str, pool: str) -> Endpoint:
        endpoint = Endpoint(pod.name, pool=pool)
        member = self._members[pod.name] = Member(endpoint, pod, source)
        self._update(member, pod)
        for added, _ in self._watchers:
            self._call(added, endpoint)
        return endpoint

    def _update(self, member: Member, pod: PodSettings) -> None:
        endpoint = member.endpoint
        member.pod = pod
        role = pod.role or pod.labels.get(ROLE_LABEL, "")
        update(
            endpoint,
            url=pod.url,
            role=role,
            labels={ROLE_LABEL: role, **pod.labels} if role else pod.labels,
            weight=pod.weight,
            engine=pod.engine,
            api_key=pod.api_key,
            tls=pod.tls,
        )
        self._name_models(member)
        self._settle(member)

    def _name_models(self, member: Member) -> None:
        if self._models.learn(member):
            self._serving = None
            if self._models_changed is not None:
                self._models_changed.set_result(None)
                self._models_changed = None

    def _set_draining(self, member: Member, draining: bool) -> None:
        member.draining = draining
        self._settle(member)
        self._doubts.reconsider()
        self._call(self._on_drained, member.endpoint)

    def _leave(self, member: Member) -> None:
        self._heirs.forget(member)
        if member.leave_by is None:
            member.leave_by = self._clock.now() + self._grace
            self._settle(member)
            self._doubts.reconsider()

    def _drop(self, member: Member) -> None:
        endpoint = member.endpoint
        self._heirs.forget(member)
        del self._members[endpoint.name]
        self._serving = None
        if self._slow_start is not None:
            self._slow_start.ended(endpoint)
        self._list_draining()
        for hook in (self._on_removed, *(removed for _, removed in self._watchers)):
            self._call(hook, endpoint)
        update(endpoint, state=EndpointState.GONE)  # after the hooks: they ask whether it was draining

    def _turn_over(self, member: Member) -> None:
        """It has fallen asleep, or woken up, without its caches."""
        member.asleep = not member.asleep
        self._settle(member)
        self._doubts.reconsider()
        if not member.asleep:
            self._call(self._on_restarted, member.endpoint)

    def _settle(self, member: Member) -> None:
        if member.contact is not EndpointState.EJECTED:
            member.refused_at = None
        elif member.refused_at is None:
            member.refused_at = self._clock.now()
        leaving = member.draining or member.leave_by is not None
        state = EndpointState.DRAINING if leaving else member.contact
        if state is EndpointState.READY and (
            member.asleep or (member.doubts and member.endpoint.pool not in self._doubts.panics)
        ):
            state = EndpointState.EJECTED
        if state is not member.endpoint.state:
            self._announce(member.endpoint, state)
            was = member.endpoint.state
            update(member.endpoint, state=state)
            self._serving = None
            self._start_slowly(member.endpoint, was)
            if EndpointState.DRAINING in (was, state):
                self._list_draining()
            self._call(self._on_moved, member.endpoint)
            self._call(self._on_changed, member.endpoint)

    def _start_slowly(self, endpoint: Endpoint, was: EndpointState) -> None:
        """Those that all are asked for because too many are in doubt have not come back."""
        if self._slow_start is None:
            return
        if endpoint.state is not EndpointState.READY:
            self._slow_start.ended(endpoint)
        elif was is EndpointState.EJECTED and endpoint.pool not in self._doubts.panics:
            self._slow_start.began(endpoint)

    def _list_draining(self) -> None:
        self.draining = tuple(pod for pod in self.endpoints if pod.state is EndpointState.DRAINING)

    def _announce(self, endpoint: Endpoint, state: EndpointState) -> None:
        log.info("pod %s: %s -> %s", endpoint.name, endpoint.state.value, state.value)

    def _renew(self) -> Serving:
        self._serving = self._thinned(Serving(self.endpoints))
        return self._serving

    def _renew_within(self, serving: Serving, pool: str) -> Serving:
        mine = Serving(endpoint for endpoint in serving.ready if endpoint.pool == pool)
        serving.pools[pool] = self._thinned(mine)
        return mine

    def _thinned(self, serving: Serving) -> Serving:
        if self._slow_start:
            serving.of = self._slow_start.thinned(serving.of, self._forget_serving)
        return serving

    def _forget_serving(self) -> None:
        self._serving = None

    def _member_of(self, endpoint: Endpoint) -> Member | None:
        member = self._members.get(endpoint.name)
        return member if member and member.endpoint is endpoint else None

    def _call(self, hook: Hook, endpoint: Endpoint) -> None:
        try:
            hook(endpoint)
        except Exception:
            log.exception("a hook failed for pod %s", endpoint.name)


class Serving:
    """The ready endpoints at one moment, by model. The fleet makes a new one after every change, so this one may
    remember its answers; it remembers those for models that exist, so what clients make up takes no memory."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.ready = tuple(endpoint for endpoint in endpoints if endpoint.state is EndpointState.READY)
        self.of: Callable[[str], Sequence[Endpoint]] = _ByModel(self.ready).__getitem__
        """In the order of the fleet; an endpoint that names no models serves any, and any serves a request without."""
        self.pools: dict[str, Serving] = {}
        """Those of single pools that somebody has asked for."""


class _ByModel(dict[str, tuple[Endpoint, ...]]):
    """What is remembered: to find it takes no step of Python, twice per request."""

    def __init__(self, ready: tuple[Endpoint, ...]) -> None:
        super().__init__({"": ready})
        self._ready = ready
        self._any = tuple(endpoint for endpoint in ready if not endpoint.models)
        self._named = frozenset(model for endpoint in ready for model in endpoint.models or ())

    def __missing__(self, model: str) -> tuple[Endpoint, ...]:
        if model not in self._named:
            return self._any
        found = tuple(endpoint for endpoint in self._ready if not endpoint.models or model in endpoint.models)
        self[model] = found
        return found


class PoolPods:
    """As the fleet has them; where there is but one pool, the fleet itself is asked instead."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self._pool = pool

    def serving(self, model: str) -> Sequence[Endpoint]:
        """The ready ones that serve the model."""
        return self._fleet.within(self._pool).of(model)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return self._fleet.within(self._pool).ready

    def watch(self, added: Hook, removed: Hook) -> Callable[[], None]:
        """See Fleet.watch."""

        def mine(hook: Hook) -> Hook:
            return lambda endpoint: hook(endpoint) if endpoint.pool == self._pool else None

        return self._fleet.watch(mine(added), mine(removed))


Pods = Fleet | PoolPods


def pods_of(fleet: Fleet, pool: str, pools: int) -> Pods:
    """Of one of so many pools."""
    return fleet if pools == 1 else PoolPods(fleet, pool)
