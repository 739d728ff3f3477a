"""Plugin types that users know and that do not exist here yet: naming one is no typo."""

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
