"""What a pool is configured with, that of the top level and those of the `pools` section: pods, scheduling, waiting."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy import picker_config
from proxy.core import params
from proxy.core.clock import SystemClock
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.errors import Problem
from proxy.core.params import Invalid, join
from proxy.core.ports import Clock, KvEvents, Random, Tokenizers
from proxy.core.registry import Registry
from proxy.core.state import State
from proxy.core.wiring import Ports
from proxy.disagg.settings import DisaggregationSettings
from proxy.fleet.dialects import Engines
from proxy.fleet.settings import PodSources
from proxy.flowcontrol.settings import FlowControlSettings
from proxy.kvevents.subscriptions import KvSubscriptions, watch_nothing
from proxy.scheduling import document
from proxy.scheduling.build import faults
from proxy.scheduling.document import Document
from proxy.tokens.source import TokenSource

Faults = list[Problem]

_NAME = re.compile(r"[A-Za-z0-9._-]+")

_SECTIONS = ("pods", "scheduling", "flowControl", "disaggregation")


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`scheduling` is the document of that section, `engines` the dialects it knows, `given` what was written."""

    pods: PodSources = field(default_factory=PodSources)
    flow_control: FlowControlSettings = field(default_factory=FlowControlSettings)
    disaggregation: DisaggregationSettings = field(default_factory=DisaggregationSettings)
    scheduling: Document = field(default_factory=lambda: Document(given=False))
    engines: Engines = field(default_factory=Engines)
    given: Mapping[str, Any] = field(default_factory=dict)


def parts(section: Mapping[str, Any], path: str, problems: Faults) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section without its scheduling, but with what that says of scraping and waiting; and what became of it."""
    scheduling = document.read(section.get("scheduling"), join(path, "scheduling"))
    problems.extend(faults(scheduling, Registry.discover(), _ports()))
    rest = {key: value for key, value in section.items() if key != "scheduling"}
    pods, layer = rest.get("pods") or {}, scheduling.data_layer
    own: Faults = []
    if isinstance(pods, Mapping):
        rest["pods"] = picker_config.pods_section(pods, layer, own)
    if said := scheduling.flow_control:
        rest["flowControl"] = picker_config.flow_control_section(rest.get("flowControl"), said, own)
    engines = picker_config.engines(layer.core, own)
    problems.extend(Problem(join(path, problem.path), problem.message) for problem in own)
    return rest, {"scheduling": scheduling, "engines": engines}


def read(section: Any, disaggregation: Any, problems: Faults) -> dict[str, PoolSettings]:
    """Those of the section `pools`, in their order, as far as they are good. What they do not say of disaggregation,
    that of the top level says."""
    if not (section is None or isinstance(section, Mapping)):
        problems.append(Problem("pools", "must be a mapping of names to pools"))
        return {}
    pools = {}
    for name, pool in (section or {}).items():
        path = f"pools.{name}"
        if name == DEFAULT_POOL:
            problems.append(Problem(path, "its pods, scheduling and flowControl stand at the top level"))
        elif not _NAME.fullmatch(str(name)):
            problems.append(Problem(path, "a name is made of letters, digits, dots, dashes and underscores"))
        elif not (pool is None or isinstance(pool, Mapping)):
            problems.append(Problem(path, f"must be a mapping with {', '.join(_SECTIONS)}"))
        elif (made := _read_one(_with(disaggregation, pool or {}), path, problems)) is not None:
            pools[str(name)] = made
    return pools


def taken(pools: Mapping[str, PoolSettings]) -> list[Problem]:
    """A problem for every static pod whose name or URL one of an earlier pool has."""
    problems: list[Problem] = []
    first: dict[tuple[str, str], str] = {}
    for name, pool in pools.items():
        place = join("" if name == DEFAULT_POOL else f"pools.{name}", "pods.static")
        for index, pod in enumerate(pool.pods.static):
            for key, value in (("name", pod.name), ("url", pod.url)):
                other = first.setdefault((key, value), name)
                if other != name:
                    problems.append(Problem(f"{place}[{index}].{key}", f"'{value}' is taken by the pool '{other}'"))
    return problems


def _with(disaggregation: Any, section: Mapping[str, Any]) -> Mapping[str, Any]:
    """The engines of most installations have one connector: a pool that was not told another would fail silently."""
    own = section.get("disaggregation") or {}
    if not (disaggregation and isinstance(disaggregation, Mapping) and isinstance(own, Mapping)):
        return section
    return {**section, "disaggregation": {**disaggregation, **own}}


def _read_one(section: Mapping[str, Any], path: str, problems: Faults) -> PoolSettings | None:
    rest, apart = parts(section, path, problems)
    try:
        return params.build(PoolSettings, rest, path, {**apart, "given": section})
    except Invalid as invalid:
        problems.extend(invalid.problems)
        return None


def _ports() -> Ports:
    """Those of the proxy, so that a model that cannot be read, or a package that is missing, is a fault like others."""
    clock, draft = SystemClock(), State().draft()
    return {
        Clock: clock,
        Random: random.Random(),
        KvEvents: KvSubscriptions(DEFAULT_POOL, watch_nothing, draft),
        Tokenizers: TokenSource(clock.wall, draft),
    }
