"""Plugin types that users know and that do not exist here, yet or any more: naming one is no typo."""

from __future__ import annotations

NOT_YET = "is not yet supported"

LATER_TYPES = frozenset(
    {
        "by-label",
        "cross-replica-publisher",
        "disaggregatedset-rollout-pod-extractor",
        "disaggregatedset-rollout-screener",
        "local-syncer",
        "multicluster-approx-prefix-cache-producer",
        "multicluster-file-discovery",
        "multicluster-kv-cache-utilization-scorer",
        "multicluster-metrics-data-source",
        "multicluster-metrics-extractor",
        "multicluster-prefix-cache-scorer",
        "multicluster-queue-scorer",
        "multicluster-session-affinity-filter",
        "p2p-source-producer",
        "vertexai-parser",
        "vllmgrpc-parser",
    }
)

REMOVED_TYPES = {
    "decision-tree-filter": "no longer exists; list the filters one after the other in a profile",
    "least-kv-cache-filter": "no longer exists; use kv-cache-utilization-scorer",
    "least-queue-filter": "no longer exists; use queue-scorer",
    "lora-affinity-filter": "no longer exists; use lora-affinity-scorer",
    "low-queue-filter": "no longer exists; use queue-scorer, or utilization-filter with "
    "'conditions: [{metric: waiting-queue, maxValue: 128}]'",
}
"""Plugin types of earlier releases of the Gateway API inference scheduler, and what replaces each."""
