"""Plugin types that users know and that do not exist here yet: naming one is no typo."""

from __future__ import annotations

NOT_YET = "is not yet supported"

LATER_TYPES = frozenset(
    {
        "by-label",
        "disaggregatedset-rollout-screener",
        "local-syncer",
        "multicluster-kv-cache-utilization-scorer",
        "multicluster-prefix-cache-scorer",
        "multicluster-queue-scorer",
        "multicluster-session-affinity-filter",
        "p2p-source-producer",
        "vertexai-parser",
        "vllmgrpc-parser",
    }
)
