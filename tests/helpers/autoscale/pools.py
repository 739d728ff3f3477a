"""A pool of prefill and decode, and what is seen of it."""

from __future__ import annotations

from typing import Any

from proxy.autoscale.policy import RoleSituation
from proxy.autoscale.settings import ScalingPolicy, load

BACKLOG, KV_SUM = "backlog_seconds", "kv_sum"


def pool(**changed: Any) -> ScalingPolicy:
    """As YAML has it: prefill is sized by its backlog, decode by the KV cache in use; no limits unless given."""
    section = {
        "roles": [
            {"name": "prefill", "min": 1, "max": 20, "metrics": [{"name": BACKLOG, "kind": "total", "target": 1.5}]},
            {"name": "decode", "min": 1, "max": 40, "metrics": [{"name": KV_SUM, "kind": "total", "target": 0.8}]},
        ],
        "behavior": {
            "scaleUp": {"select": "none"},
            "scaleDown": {"select": "none", "stabilization": "0s"},
            "panic": {"hold": "0s"},
        },
        "coordination": {"mode": "preferred", "hysteresisPercent": 0},
        "settle": "30s",
        **changed,
    }
    return load({"pools": {"default": section}}).pools["default"]


def seen(
    prefill: int, decode: int, *, backlog: float | None = None, kv: float | None = None, **more: Any
) -> dict[str, RoleSituation]:
    """All ready and idle; the metrics are what keeps the total as it is, unless they are given."""
    return {
        "prefill": RoleSituation(
            prefill,
            more.get("prefill_ready", prefill),
            0,
            {BACKLOG: 1.5 * prefill if backlog is None else backlog},
            more.get("prefill_signals", {"queue_depth": 1.0, "ttft": 0.1}),
        ),
        "decode": RoleSituation(
            decode,
            more.get("decode_ready", decode),
            more.get("draining", 0),
            {KV_SUM: 0.8 * decode if kv is None else kv},
            more.get("decode_signals", {"queue_depth": 1.0, "kv_cache_utilization": 0.05}),
        ),
    }
