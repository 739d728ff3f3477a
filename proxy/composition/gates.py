"""What a request must pass before a pod is chosen: limits, shedding, flow control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from proxy.access.admission import Admission
from proxy.access.door import Door
from proxy.access.gate import LimitsGate
from proxy.access.series import LimitSeries
from proxy.composition.observation import Observation
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Gate, Names, Random
from proxy.core.request import InferenceRequest
from proxy.extproc.addresses import Addresses
from proxy.extproc.subset import SubsetGate
from proxy.fleet.datastore import Fleet
from proxy.fleet.pool_pods import Pods, pods_of
from proxy.flowcontrol.controller import FlowControl
from proxy.flowcontrol.series import FlowSeries
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.flowcontrol.shedding import SheddingGate
from proxy.pool_settings import PoolSettings
from proxy.settings import Settings


class Gates:
    """Of each pool those that there are, in their order. Those that have somebody in them, or know what he has had,
    stay the same when settings change."""

    def __init__(
        self,
        settings: Settings,
        door: Door | None,
        workers: int,
        fleet: Fleet,
        clock: Clock,
        rng: Random,
        observation: Observation,
    ) -> None:
        """`workers` that serve together."""
        self._workers = workers
        self._fleet = fleet
        self._clock = clock
        self._random = rng
        self._catalogue = observation.catalogue
        self._readers = observation.readers
        self.flow_controls: dict[str, FlowControl] = {}
        """Of the pools where somebody may have to wait, and of those where this was so."""
        self._shown: dict[str, Callable[[], None]] = {}
        self.limits = self._make_limits(door)
        self.addresses = Addresses(clock)
        """Of pods, as gateways know them."""
        self._subset = SubsetGate(self.addresses) if settings.extproc.is_on else None
        self._all: dict[str, Sequence[Gate]] = {}
        self._follow(settings.all_pools)

    def change(self, settings: Settings, door: Door | None) -> None:
        if self.limits is None or door is None:
            self.limits = self._make_limits(door)
        else:
            self.limits.change(door.limits, door.tenants)
        self._follow(settings.all_pools)

    def of(self, pool: str) -> Sequence[Gate]:
        return self._all[pool]

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(self._all.values())

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Pods of a pool that are asked after another one has failed."""
        flow_control = self.flow_controls.get(endpoints[0].pool)
        return endpoints if flow_control is None else flow_control.narrow(request, endpoints)

    def look(self, pool: str) -> None:
        """There may be room that was not there."""
        if (flow_control := self.flow_controls.get(pool)) is not None:
            flow_control.look()

    def admission(self, door: Door | None, models: Names | None) -> Admission | Names | None:
        if door is None:
            return models
        return Admission(models, None if self.limits is None else self.limits.counts_tokens)

    def _follow(self, pools: Mapping[str, PoolSettings]) -> None:
        for name in self.flow_controls.keys() - pools.keys():
            self._end_flow_control(name)
        for name, pool in pools.items():
            pods = pods_of(self._fleet, name, len(pools))
            if name in self.flow_controls:
                self.flow_controls[name].change(pool.flow_control.part(self._workers), pods)
            elif pool.flow_control.limits:
                self._begin_flow_control(name, pool.flow_control, pods)
        self._all = {name: self._in_order(name, pool.flow_control) for name, pool in pools.items()}

    def _begin_flow_control(self, pool: str, settings: FlowControlSettings, pods: Pods) -> None:
        series = FlowSeries(self._catalogue, pool)
        gate = self.flow_controls[pool] = FlowControl(settings.part(self._workers), pods, self._clock, series)
        self._shown[pool] = partial(series.read, gate.queue, gate.room)
        self._readers.append(self._shown[pool])

    def _end_flow_control(self, pool: str) -> None:
        """Whoever waits goes on, to find that the pods are gone."""
        self.flow_controls.pop(pool).change(FlowControlSettings(), pods_of(self._fleet, pool, 2))
        self._readers.remove(self._shown.pop(pool))
        FlowSeries(self._catalogue, pool).end()

    def _make_limits(self, door: Door | None) -> LimitsGate | None:
        """None where nobody can have any."""
        if door is None or not door.limits_some:
            return None
        return LimitsGate(door.limits, door.tenants, self._clock, LimitSeries(self._catalogue))

    def _in_order(self, pool: str, settings: FlowControlSettings) -> Sequence[Gate]:
        shedding = None
        if settings.sheds:
            shedding = SheddingGate(settings.shedding, self._random, FlowSeries(self._catalogue, pool))
        gates = (self.limits, self._subset, shedding, self.flow_controls.get(pool))
        return [gate for gate in gates if gate is not None]
