"""Plugin types that users know and that do not exist here yet: naming one is no typo."""

from __future__ import annotations

NOT_YET = "is not yet supported"

LATER_TYPES = frozenset(
    {
        "burst-prefix-cache-producer",
        "by-label",
        "dcgm-data-source",
        "dcgm-extractor",
        "disaggregatedset-rollout-screener",
        "local-syncer",
        "mm-embeddings-cache-producer",
        "mm-embeddings-cache-scorer",
        "multicluster-kv-cache-utilization-scorer",
        "multicluster-prefix-cache-scorer",
        "multicluster-queue-scorer",
        "multicluster-session-affinity-filter",
        "p2p-source-producer",
        "program-aware-fairness",
        "sglanghttp-parser",
        "soft-reflective-ceiling-policy",
        "vertexai-parser",
        "vllmgrpc-parser",
    }
)
