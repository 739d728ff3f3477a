"""The fleet's pods: their states, and which ready endpoints serve which model."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from proxy.core.endpoint import DEFAULT_POOL, ROLE_LABEL, Endpoint, EndpointState, Freshness, join_ranks, update
from proxy.core.ports import Clock
from proxy.fleet.dialects import Dialects
from proxy.fleet.models import NamedModels
from proxy.fleet.records import OWN, RANKS_IGNORED, Contact, Ejections, PodRecord, SlowStart, Successors
from proxy.fleet.scrape import Card
from proxy.fleet.settings import PodSettings

log = logging.getLogger(__name__)

ASLEEP = "asleep"

OPERATOR, AUTOSCALER = "operator", "autoscaler"
"""Who drains a pod. The operator is also the source of pods that were added through the admin port."""

Hook = Callable[[Endpoint], None]


def _nothing(endpoint: Endpoint) -> None:
    pass


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`static`: the names of the configured pods by source. A pod that moves to another source, of another pool, leaves
    its old one first. `slow_start` is in seconds. `dialects`, by pool, decide the engine of each pod."""

    pools: Sequence[str] = (DEFAULT_POOL,)
    static: Mapping[str, Collection[str]] = field(default_factory=dict)
    panic_percent: float = 50.0
    slow_start: float = 0.0
    wakes: bool = False
    dialects: Mapping[str, Dialects] = field(default_factory=dict)


@dataclass(eq=False)
class Fleet(NamedModels):
    """The pods and their endpoints, by name.

    Hooks are called in the tick of the change. A hook that fails is logged; the change stands.

    on_ready      the pod responded, for the first time or again after it refused connections
    on_restarted  the pod lost its caches, by a restart or asleep: forget what was known of them; called for each rank
    on_removed    the pod is gone for good: forget it
    on_missed     a scrape of the pod failed
    on_moved      the state of the pod changed
    on_ejection_change  the reasons changed for which this process ejects the pod
    on_drained    the pod is drained, or returned to service
    on_changed    the pod has new metrics or another state: queued requests may go on

    A removed pod gets no new requests, and goes when its last one ends or `grace` seconds have passed.

    A pod that responds is ejected while there is a reason, unless more than `panic_percent` of the pods that respond
    would be: then requests go to all of them. A pod that sleeps gets none in any case.
    """

    _clock: Clock
    _: KW_ONLY
    on_ready: Hook = _nothing
    on_restarted: Hook = _nothing
    on_removed: Hook = _nothing
    on_missed: Hook = _nothing
    on_moved: Hook = _nothing
    on_ejection_change: Hook = _nothing
    on_drained: Hook = _nothing
    on_changed: Hook = _nothing
    slow_start: SlowStart | None = None
    grace: float = 120.0
    pools: Sequence[str] = (DEFAULT_POOL,)
    """All pools; see `form`."""
    draining: Sequence[Endpoint] = ()

    def __post_init__(self) -> None:
        super().__init__()
        self._settings = FleetSettings()
        self._endpoints: dict[str, Endpoint] = {}
        self._record_by: dict[Endpoint, PodRecord] = {}
        self._ejections = Ejections(self._records, self._update_state, self._settings.panic_percent)
        self._successors = Successors(self._leave)
        self._refused: dict[tuple[str, str], tuple[PodSettings, str]] = {}
        """By name and source: pods, with their pools, that another source has under the same name. Each joins when the
        other one leaves, because its source does not report it again."""
        self._watchers: list[tuple[Hook, Hook]] = []
        self._serving: ServingPods | None = None
        self._models_changed: asyncio.Future[None] | None = None

    @property
    def settings(self) -> FleetSettings:
        return self._settings

    @settings.setter
    def settings(self, settings: FleetSettings) -> None:
        before, self._settings = self._settings, settings
        self.wakes = settings.wakes
        self.form(settings.pools)
        for record in self._records.values():
            own = settings.static.get(record.source)
            if own is not None and record.name not in own and any(record.name in of for of in settings.static.values()):
                self._leave(record)
        for record in self._records.values() if settings.dialects != before.dialects else ():
            self._update(record, record.pod)
        if self.slow_start is not None:
            self.slow_start.seconds = settings.slow_start
            self._serving = None
        self._ejections.panic_percent = settings.panic_percent
        self._ejections.reconsider()

    # For the data path.

    def endpoints_for(self, model: str) -> Sequence[Endpoint]:
        """Return the ready endpoints that serve the model; O(1)."""
        return (self._serving or self._renew()).of(model)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return (self._serving or self._renew()).ready

    def within(self, pool: str) -> ServingPods:
        """Return the ready endpoints of one pool. Valid until the next change of the fleet."""
        serving = self._serving or self._renew()
        return serving.pools.get(pool) or self._renew_within(serving, pool)

    @property
    def serves(self) -> bool:
        """Whether a pod is ready or would be woken."""
        return bool(self.ready) or (self.wakes and any(record.can_be_woken for record in self._records.values()))

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """All endpoints, in any state."""
        return list(self._endpoints.values())

    @property
    def pods(self) -> Sequence[Endpoint]:
        """The first endpoint of each pod, in any state."""
        return [record.endpoint for record in self._records.values()]

    def get(self, name: str) -> Endpoint | None:
        """Return the endpoint of this name, or the first one of the pod of this name."""
        endpoint = self._endpoints.get(name)
        if endpoint is None and (record := self._records.get(name)) is not None:
            return record.endpoint
        return endpoint

    def models_change(self) -> asyncio.Future[None]:
        """Return a future that is done when a pod lists other models than before."""
        if self._models_changed is None:
            self._models_changed = asyncio.get_running_loop().create_future()
        return self._models_changed

    def is_leaving(self, endpoint: Endpoint) -> bool:
        """Return whether the endpoint is removed and only waits for its last request."""
        record = self._record_of(endpoint)
        return record is None or record.leave_by is not None

    # For operators and discovery.

    def add(self, pod: PodSettings, source: str = OPERATOR, pool: str = DEFAULT_POOL) -> Endpoint:
        """Return a new endpoint; or the one of this name with its settings replaced, kept if it was about to leave. A
        pod of this name in another pool or with another uid is removed at once."""
        record = self._records.get(pod.name)
        if record is not None and (record.endpoint.pool, record.pod.uid) != (pool, pod.uid):
            self._drop(record)
            record = None
        if record is None:
            return self._join(pod, source, pool)
        if source != OPERATOR or record.leave_by is not None:  # a configured pod stays configured if added again
            record.source = source
        record.leave_by = None
        self._successors.forget(record)
        self._update(record, pod)
        return record.endpoint

    def remove(self, name: str) -> None:
        """Remove the pod. Raise KeyError for an unknown name."""
        self._leave(self._named(name))
        self.sweep()

    def drain(self, name: str, who: str = OPERATOR) -> None:
        """Send no new requests until `undrain`. Raise KeyError for an unknown name."""
        self.set_drained_by(name, {*self._named(name).drained_by, who})

    def undrain(self, name: str, who: str | None = None) -> None:
        """End the drain by `who`, or every drain of the pod. Raise KeyError for an unknown name."""
        self.set_drained_by(name, {*self._named(name).drained_by} - {who} if who else ())

    def set_drained_by(self, name: str, drained_by: Collection[str]) -> None:
        """Raise KeyError for an unknown name."""
        record = self._named(name)
        record.drained_by = drained_by
        self._update_state(record)
        self._ejections.reconsider()
        self._call(self.on_drained, record.endpoint)

    def has_pod(self, name: str) -> bool:
        """Return whether there is a pod of this name, even one that is about to leave."""
        return name in self._records

    def drained_by(self, endpoint: Endpoint) -> Collection[str]:
        record = self._record_of(endpoint)
        return record.drained_by if record else ()

    def reconcile(self, source: str, desired: Sequence[PodSettings], pool: str = DEFAULT_POOL) -> None:
        """Add, update and remove pods so that the source has those desired. Where none of its successors serves yet, a
        removed pod serves on until one does, or `grace` seconds have passed."""
        wanted = {pod.name for pod in desired}
        self._refused = {key: refused for key, refused in self._refused.items() if key[1] != source}
        unwanted = {record for name, record in self._records.items() if record.source == source and name not in wanted}
        for pod in desired:
            other = self._records.get(pod.name)
            if other and other.leave_by is None and other.source != source:
                log.warning(
                    "did not add pod %s of the source %s: another pod of this name %s and stays in use; rename or"
                    " remove one of them",
                    pod.name,
                    source,
                    "was added through the admin port"
                    if other.source == OPERATOR
                    else f"is of the source {other.source}",
                )
                self._refused[pod.name, source] = pod, pool
            else:
                self.add(pod, source, pool)
        self._successors.replace(unwanted, self._records.values(), self._clock.now() + self.grace)
        self.sweep()

    def form(self, pools: Sequence[str]) -> None:
        """Set the pools, in this order. Pods of other pools leave."""
        self.pools = pools
        self._refused = {key: refused for key, refused in self._refused.items() if refused[1] in pools}
        for record in self._records.values():
            if record.endpoint.pool not in pools:
                self._leave(record)

    def sweep(self) -> None:
        """Drop the removed pods whose last request has ended."""
        now = self._clock.now()
        self._successors.sweep(now)
        for record in list(self._records.values()):
            if record.leave_by is not None and (record.in_flight <= 0 or now >= record.leave_by):
                self._drop(record)
        for name, source in tuple(self._refused):
            record_of_name = self._records.get(name)
            if record_of_name is None or record_of_name.leave_by is not None:
                pod, pool = self._refused.pop((name, source))
                self.add(pod, source, pool)

    def watch(self, added: Hook, removed: Hook) -> Callable[[], None]:
        """Call `added` for every endpoint, now and later, and `removed` for endpoints that leave, until the function
        that is returned is called."""
        watcher = (added, removed)
        self._watchers.append(watcher)
        for endpoint in self.endpoints:
            added(endpoint)
        return lambda: self._watchers.remove(watcher)

    # Ejection and health. Calls for an endpoint that is gone do nothing.

    def eject(self, endpoint: Endpoint, why: str) -> None:
        """Send no requests for this reason, until `uneject`."""
        record = self._record_of(endpoint)
        if record and OWN not in record.ejection_reasons.get(why, ()):
            self._ejections.add(record, why, OWN)
            self._call(self.on_ejection_change, endpoint)

    def uneject(self, endpoint: Endpoint, why: str) -> None:
        record = self._record_of(endpoint)
        if record and OWN in record.ejection_reasons.get(why, ()):
            self._ejections.remove(record, why, OWN)
            self._call(self.on_ejection_change, endpoint)

    @property
    def panics(self) -> bool:
        """Whether ejections are ignored in some pool."""
        return bool(self._ejections.panics)

    def ejection_reasons(self, endpoint: Endpoint) -> Sequence[str]:
        """Return the reasons of all processes, and whether the pod sleeps."""
        record = self._record_of(endpoint)
        return sorted([*record.ejection_reasons, *[ASLEEP] * record.asleep]) if record else ()

    def own_ejections(self) -> Mapping[str, Sequence[str]]:
        """Return the reasons of this process, by the names of the pods that it ejects."""
        return self._ejections.own()

    def peer_ejected(self, peer: int, reasons: Mapping[str, Sequence[str]]) -> None:
        """Replace all reasons of a peer, which come by the pods' names; none if the peer is gone."""
        self._ejections.replace_of_peer(peer, reasons)

    def scrape_age(self, endpoint: Endpoint) -> float | None:
        """Return the seconds since the last good scrape was sent; None before the first."""
        scraped_at = endpoint.metrics.scraped_at
        return None if scraped_at == -math.inf else self._clock.now() - scraped_at

    def scrape_failure(self, endpoint: Endpoint) -> str | None:
        """Return why the last scrape failed; None if it did not fail."""
        record = self._record_of(endpoint)
        return record.scrape_failure if record else None

    def failing_since(self, endpoint: Endpoint) -> float | None:
        """Return since when all scrapes have failed; None if the last one did not fail."""
        record = self._record_of(endpoint)
        return record.failing_since if record else None

    def lost_at(self, endpoint: Endpoint, sent_at: float) -> float | None:
        """Return since when a request that was sent at `sent_at` is lost: the pod refuses connections or was restarted.
        None if it is not lost, as far as is known."""
        record = self._record_of(endpoint)
        if record is None:
            return None
        return record.restarted_at if record.restarted_at > sent_at else record.refused_at

    # Reports of the refresh loops. Reports of an endpoint that is gone do nothing.

    def missed(self, endpoint: Endpoint, why: str) -> None:
        if record := self._record_of(endpoint):
            record.scrape_failure = why
            if record.failing_since is None:
                record.failing_since = self._clock.now()
            self._call(self.on_missed, endpoint)

    def reached(self, endpoint: Endpoint) -> None:
        """The pod responds: starting or ejected -> ready."""
        if record := self._record_of(endpoint):
            record.contact = Contact.RESPONDS
            self._update_state(record)
            self._ejections.reconsider()
            for each in record.endpoints:
                self._call(self.on_ready, each)
            self._successors.came(record)

    def refused(self, endpoint: Endpoint) -> None:
        """The pod refuses connections: ready -> ejected."""
        if record := self._record_of(endpoint):
            record.contact = Contact.REFUSES
            self._update_state(record)
            self._ejections.reconsider()

    def restarted(self, endpoint: Endpoint) -> None:
        """The pod came back without its caches."""
        if record := self._record_of(endpoint):
            record.restarted_at = self._clock.now()
            self.uneject(endpoint, RANKS_IGNORED)
            for each in record.endpoints:
                self._call(self.on_restarted, each)

    def refreshed(self, endpoint: Endpoint) -> None:
        """The endpoint has new metrics. The metrics of a pod's ranks are published together, then reported for each."""
        record = self._record_of(endpoint)
        if record is not None and endpoint.metrics.freshness is Freshness.FRESH:
            record.scrape_failure = record.failing_since = None
        if record is not None and record.asleep is not any(each.metrics.sleep_level for each in record.endpoints):
            self._turn_over(record)
        self._call(self.on_changed, endpoint)

    def ranks_seen(self, endpoint: Endpoint, number: int) -> Sequence[Endpoint]:
        """The pod's metrics are of so many data-parallel ranks. Return its endpoints, which may be other ones now."""
        record = self._record_of(endpoint)
        if record is None:
            return endpoint.ranks
        if (size := record.size_for(number)) != len(record.endpoints):
            self._resize(record, size)
        return record.endpoints

    def ranks_ignored(self, endpoint: Endpoint) -> None:
        """The pod computes requests on other ranks than they name: until it restarts it is one endpoint."""
        log.warning(
            "pod %s ignores the data-parallel rank that requests name: it is one endpoint now; update the engine, or "
            "write dataParallel: {size: 1}",
            endpoint.pod_name,
        )
        self.eject(endpoint, RANKS_IGNORED)

    def rank_refused(self, endpoint: Endpoint, size: int) -> None:
        """The pod has `size` ranks, fewer than it has endpoints: remove the others before the next scrape."""
        record = self._record_of(endpoint)
        if record is None or size >= len(record.endpoints):
            return
        log.warning(
            "pod %s does not have data-parallel rank %s: it has %d; correct dataParallel.size",
            record.name,
            endpoint.rank,
            size,
        )
        if size == 1:  # metrics without ranks would not say so
            self.eject(endpoint, RANKS_IGNORED)
        else:
            self._resize(record, size)

    def listed(self, endpoint: Endpoint, cards: Sequence[Card]) -> None:
        """The pod listed its models; no cards: it has no list, and serves any model."""
        if record := self._record_of(endpoint):
            record.cards = cards
            self._name_models(record)

    # Internals.

    def _join(self, pod: PodSettings, source: str, pool: str) -> Endpoint:
        record = PodRecord((), pod, source)
        record.endpoints = _made(pod.name, pool, record.size_for(1), ())
        self._records[pod.name] = record
        self._list_endpoints()
        self._update(record, pod)
        for endpoint in record.endpoints:
            self._announce_added(endpoint)
        return record.endpoint

    def _announce_added(self, endpoint: Endpoint) -> None:
        for added, _ in self._watchers:
            self._call(added, endpoint)

    def _update(self, record: PodRecord, pod: PodSettings) -> None:
        before, record.pod = record.pod, pod
        if before.data_parallel != pod.data_parallel:
            self.ranks_seen(record.endpoint, len(record.endpoints))
        role = pod.role or pod.labels.get(ROLE_LABEL, "")
        dialects = self._settings.dialects.get(record.endpoint.pool, Dialects())
        for endpoint in record.endpoints:
            update(
                endpoint,
                url=pod.url,
                role=role,
                labels={ROLE_LABEL: role, **pod.labels} if role else pod.labels,
                weight=pod.weight,
                engine=dialects.engine(pod.labels, pod.engine),
                api_key=pod.api_key,
                tls=pod.tls,
            )
        self._name_models(record)
        self._update_state(record)

    def _resize(self, record: PodRecord, size: int) -> None:
        """Give the pod so many endpoints. Ranks that it had and has stay, with all that is known of them."""
        before = record.endpoints
        record.endpoints = _made(record.name, record.endpoint.pool, size, before)
        if len(before) > 1 or size > 1:
            log.info("pod %s: %d data-parallel ranks, was %d", record.name, size, len(before))
        gone = [endpoint for endpoint in before if endpoint not in record.endpoints]
        self._list_endpoints()
        new = [endpoint for endpoint in record.endpoints if endpoint not in before]
        for endpoint in new:
            update(endpoint, models=before[0].models, adapters=before[0].adapters, state=before[0].state)
        self._update(record, record.pod)
        for endpoint in gone:
            self._record_by[endpoint] = record  # hooks end the ejections of the pod that its endpoint caused
            self._part_with(endpoint)
            self._record_by.pop(endpoint, None)
        for endpoint in new:
            self._announce_added(endpoint)
            if endpoint.state is EndpointState.READY:
                self._call(self.on_ready, endpoint)
                self._call(self.on_changed, endpoint)

    def _name_models(self, record: PodRecord) -> None:
        if self._learn_models(record):
            self._serving = None
            if self._models_changed is not None:
                self._models_changed.set_result(None)
                self._models_changed = None

    def _leave(self, record: PodRecord) -> None:
        self._successors.forget(record)
        if record.leave_by is None:
            record.leave_by = self._clock.now() + self.grace
            self._update_state(record)
            self._ejections.reconsider()

    def _drop(self, record: PodRecord) -> None:
        self._successors.forget(record)
        del self._records[record.name]
        self._list_endpoints()
        for endpoint in record.endpoints:
            self._part_with(endpoint)
        if record.reasons_of(OWN):  # a peer may have applied them to the next pod of this name
            self._call(self.on_ejection_change, record.endpoint)

    def _part_with(self, endpoint: Endpoint) -> None:
        if self.slow_start is not None:
            self.slow_start.ended(endpoint)
        for hook in (self.on_removed, *(removed for _, removed in self._watchers)):
            self._call(hook, endpoint)
        update(endpoint, state=EndpointState.GONE)  # after the hooks, which read whether it was draining

    def _list_endpoints(self) -> None:
        self._record_by = {each: record for record in self._records.values() for each in record.endpoints}
        self._endpoints = {each.name: each for each in self._record_by}
        self._serving = None
        self._list_draining()

    def _turn_over(self, record: PodRecord) -> None:
        """The pod has fallen asleep, or woken up without its caches."""
        record.asleep = not record.asleep
        self._update_state(record)
        self._ejections.reconsider()
        for endpoint in record.endpoints if not record.asleep else ():
            self._call(self.on_restarted, endpoint)

    def _update_state(self, record: PodRecord) -> None:
        if len(record.endpoints) > 1 and not record.obeys_ranks:
            self._resize(record, 1)
            return
        if record.contact is not Contact.REFUSES:
            record.refused_at = None
        elif record.refused_at is None:
            record.refused_at = self._clock.now()
        leaving = record.drained_by or record.leave_by is not None
        state = EndpointState.DRAINING if leaving else EndpointState(record.contact.value)
        if state is EndpointState.READY and (
            record.asleep or (record.has_ejection_reason and record.endpoint.pool not in self._ejections.panics)
        ):
            state = EndpointState.EJECTED
        if state is not record.endpoint.state:
            was = record.endpoint.state
            self._announce(record, was, state)
            for endpoint in record.endpoints:
                update(endpoint, state=state)
                self._start_slowly(endpoint, was)
            self._serving = None
            if EndpointState.DRAINING in (was, state):
                self._list_draining()
            for endpoint in record.endpoints:
                self._call(self.on_moved, endpoint)
                self._call(self.on_changed, endpoint)

    def _start_slowly(self, endpoint: Endpoint, was: EndpointState) -> None:
        """A pod that only the panic threshold makes ready has not come back."""
        if self.slow_start is None:
            return
        if endpoint.state is not EndpointState.READY:
            self.slow_start.ended(endpoint)
        elif was is EndpointState.EJECTED and endpoint.pool not in self._ejections.panics:
            self.slow_start.began(endpoint)

    def _list_draining(self) -> None:
        self.draining = tuple(pod for pod in self.endpoints if pod.state is EndpointState.DRAINING)

    def _announce(self, record: PodRecord, was: EndpointState, state: EndpointState) -> None:
        log.info("pod %s: %s -> %s", record.name, was.value, state.value)

    def _renew(self) -> ServingPods:
        self._serving = self._thinned(ServingPods(self.endpoints))
        return self._serving

    def _renew_within(self, serving: ServingPods, pool: str) -> ServingPods:
        mine = ServingPods(endpoint for endpoint in serving.ready if endpoint.pool == pool)
        serving.pools[pool] = self._thinned(mine)
        return mine

    def _thinned(self, serving: ServingPods) -> ServingPods:
        if self.slow_start:
            serving.of = self.slow_start.thinned(serving.of, self._forget_serving)
        return serving

    def _forget_serving(self) -> None:
        self._serving = None

    def _record_of(self, endpoint: Endpoint) -> PodRecord | None:
        return self._record_by.get(endpoint)

    def _named(self, name: str) -> PodRecord:
        """Return the pod of this name, or the pod that has the rank of this name. Raises KeyError."""
        return self._records.get(name) or self._record_by[self._endpoints[name]]

    def _call(self, hook: Hook, endpoint: Endpoint) -> None:
        try:
            hook(endpoint)
        except Exception:
            log.exception("a hook failed for pod %s", endpoint.name)


def _made(name: str, pool: str, size: int, before: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """Return the endpoints of a pod with so many ranks; endpoints of `before` where they stay."""
    if size == 1:
        return (before[0] if len(before) == 1 and before[0].rank is None else Endpoint(name, pool=pool),)
    kept = [endpoint for endpoint in before if endpoint.rank is not None][:size]
    new = [Endpoint(f"{name}/{rank}", pool=pool, rank=rank) for rank in range(len(kept), size)]
    join_ranks([*kept, *new])
    return (*kept, *new)


class ServingPods:
    """The ready endpoints at one moment, by model. The fleet makes a new one after every change, so results are cached;
    only results for models that exist, so that invented names take no memory."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.ready = tuple(endpoint for endpoint in endpoints if endpoint.state is EndpointState.READY)
        self.of: Callable[[str], Sequence[Endpoint]] = _ByModel(self.ready).__getitem__
        """In the order of the fleet; an endpoint that names no models serves any, and any serves a request without."""
        self.pools: dict[str, ServingPods] = {}
        """The same for single pools, made when they are first read."""


class _ByModel(dict[str, tuple[Endpoint, ...]]):
    """The cache: a hit costs no Python frame."""

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
    """The pods of one pool. Where there is one pool only, the fleet itself is used instead."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self._pool = pool

    def endpoints_for(self, model: str) -> Sequence[Endpoint]:
        """Return the ready endpoints of the pool that serve the model."""
        return self._fleet.within(self._pool).of(model)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return self._fleet.within(self._pool).ready

    def watch(self, added: Hook, removed: Hook) -> Callable[[], None]:
        def mine(hook: Hook) -> Hook:
            return lambda endpoint: hook(endpoint) if endpoint.pool == self._pool else None

        return self._fleet.watch(mine(added), mine(removed))


Pods = Fleet | PoolPods


def pods_of(fleet: Fleet, pool: str, pools: int) -> Pods:
    """Return the pods of a pool, one of `pools`."""
    return fleet if pools == 1 else PoolPods(fleet, pool)
