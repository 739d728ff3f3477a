"""What the plugins of a scheduling know of the pods, for those who show it and share it."""

from __future__ import annotations

from collections.abc import Iterable

from proxy.plugins.producers.agent_identity import AgentIdentity
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.prefix.exact import ExactIndex
from proxy.scheduling.build import Scheduling


def prefix_producers(scheduling: Scheduling) -> list[ApproxPrefixCacheProducer]:
    return [plugin for plugin in scheduling.instances.values() if isinstance(plugin, ApproxPrefixCacheProducer)]


def exact_indexes(scheduling: Scheduling) -> list[ExactIndex]:
    plugins = scheduling.instances.values()
    return [plugin.index for plugin in plugins if isinstance(plugin, PrecisePrefixCacheProducer)]


def predictors(scheduling: Scheduling) -> list[PredictedLatencyProducer]:
    return [plugin for plugin in scheduling.instances.values() if isinstance(plugin, PredictedLatencyProducer)]


def session_headers(schedulings: Iterable[Scheduling]) -> tuple[str, ...]:
    """Those that tell the sessions of agents apart, in the order of asking; none unless a pool has the plugin."""
    plugins = (plugin for scheduling in schedulings for plugin in scheduling.instances.values())
    found = (plugin.headers for plugin in plugins if isinstance(plugin, AgentIdentity))
    return tuple(dict.fromkeys(header for headers in found for header in headers))


def index_bytes(scheduling: Scheduling) -> int:
    """Upper bound of the memory of all indexes."""
    return sum(owner.index.bytes for owner in prefix_producers(scheduling)) + sum(
        index.bytes for index in exact_indexes(scheduling)
    )
