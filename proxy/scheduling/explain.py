"""Run the scheduler offline and say what every filter and scorer did."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.core import params
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Problem, RequestError
from proxy.core.params import Invalid
from proxy.core.plugin_faults import PluginFaults
from proxy.core.ports import Clock
from proxy.core.record import DecisionRecord, ProfileRecord
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.core.wiring import Ports
from proxy.prefix.keys import PREFIX_MATCH, PrefixMatch
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from proxy.scheduling.effective import Effective
from proxy.scheduling.explain_state import ExplainState
from proxy.scheduling.layout import ProfileLayout

log = logging.getLogger(__name__)


async def explain(data: Any, registry: Registry, ports: Ports) -> dict[str, Any]:
    """`profiles` and either `decision` or `error`, ready for JSON; `faults` of plugins, if there are any. Raises
    ConfigError with every fault of the input, and for a profile handler that comes to no decision."""
    record, faults = DecisionRecord(), _Faults(ports[Clock])
    state, request, scheduling = _load(data, registry, ports, faults)
    endpoints = [stated.endpoint(ports[Clock].now()) for stated in state.endpoints]
    await _produce(scheduling, request, endpoints, state.prefix_match())
    try:
        decision = scheduling.scheduler.schedule(request, endpoints, 0, record)
        outcome = {"decision": _spelt(decision)}
    except RequestError as error:
        outcome = {"error": {"type": error.type, "message": error.message}}
    handler = scheduling.effective.handler
    if problems := [Problem(f"scheduling.plugins.{name}", text) for name, text in faults.found if name == handler]:
        raise ConfigError(problems)
    told = {"faults": [{"plugin": name, "message": text} for name, text in faults.found]} if faults.found else {}
    return {"profiles": _report(record.runs, scheduling.effective), **told, **outcome}


class _Faults(PluginFaults):
    """Keeps the faults of plugins for the explanation, instead of logging them."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.found: list[tuple[str, str]] = []

    def report(self, name: str, fault: str, complaint: str, error: BaseException | None = None) -> None:
        self.found.append((name, f"{complaint}: {error!r}" if error else complaint))


def _spelt(decision: Decision) -> dict[str, Any]:
    """The target, and what is said of other stages."""
    stages = {"prefill": decision.prefill, "encode": decision.encode}
    names = {stage: [pod.name for pod in pods] for stage, pods in stages.items() if pods}
    return {"target": decision.target.name, **names, **({"why": decision.why} if decision.why else {})}


def _load(
    data: Any, registry: Registry, ports: Ports, faults: PluginFaults
) -> tuple[ExplainState, InferenceRequest, Scheduling]:
    problems: list[Problem] = []
    state = request = scheduling = None
    try:
        state = params.build(ExplainState, data, "")
        request = state.request.request()
    except Invalid as invalid:
        problems.extend(invalid.problems)
    section = data.get("scheduling") if isinstance(data, Mapping) else None
    try:
        scheduling = build(read(section, "scheduling"), registry, ports, faults)
    except ConfigError as error:
        problems.extend(error.problems)
    if state is None or request is None or scheduling is None:
        raise ConfigError(problems)
    return state, request, scheduling


async def _produce(
    scheduling: Scheduling, request: InferenceRequest, endpoints: Sequence[Endpoint], match: PrefixMatch | None
) -> None:
    """The prefix match is what the input states, under the name of every producer of it: no index is asked."""
    for producer in scheduling.producers:
        stated = [key for key in producer.provides if key.kind == PREFIX_MATCH.kind]
        if stated and match is not None:
            request.state.write(stated[0], match)
        elif not stated:
            try:
                await producer.produce(request, endpoints)
            except Exception:
                log.exception("producer %s failed", producer.plugin_type)
    if match is not None and request.state.read(PREFIX_MATCH) is None:
        request.state.write(PREFIX_MATCH, match)


def _report(records: Sequence[ProfileRecord], effective: Effective) -> dict[str, Any]:
    """By profile, in the order in which they ran; those that did not are absent."""
    profiles = {profile.name: profile for profile in effective.profiles}
    return {record.profile: _told(record, profiles[record.profile]) for record in records}


def _told(record: ProfileRecord, profile: ProfileLayout) -> dict[str, Any]:
    weights = {use.ref: use.weight for use in profile.uses}
    names = [endpoint.name for endpoint in record.scored]
    return {
        **({"shadow": True} if record.shadow else {}),
        "filters": [{"name": name, "removed": removed} for name, removed in record.filters.items()],
        "scorers": [
            {"name": name, "weight": weights[name], "scores": dict(zip(names, scores, strict=True))}
            for name, scores in record.scores.items()
        ],
        "totals": dict(zip(names, record.totals, strict=True)),
        "ranked": [endpoint.name for endpoint in record.ranked],
    }
