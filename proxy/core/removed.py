"""Settings that were removed, and what holds in their place."""

from __future__ import annotations

import re
from collections.abc import Mapping

REMOVED: Mapping[str, str] = {
    "autoscale.pools.*.history": "it is always 1000 decisions",
    "autoscale.prometheus.timeout": "it is always 5 s",
    "models.kubernetes.retry": "it is always 500 ms",
    "models.kubernetes.timeout": "it is always 10 s",
    "models.kubernetes.watch": "it is always 5 minutes",
    "pods.dns.tls": "write pods.tls, or tls of a static pod that differs",
    "pods.kubernetes.retry": "it is always 500 ms",
    "pods.kubernetes.timeout": "it is always 10 s",
    "pods.kubernetes.tls": "write pods.tls, or tls of a static pod that differs",
    "pods.kubernetes.watch": "it is always 5 minutes",
    "pods.warmup.concurrency": "it is always 2 prompts at a time",
    "pods.warmup.maxBytes": "it is always 4 MiB",
    "pods.warmup.sample": "it is always one answered request in 8",
    "pods.warmup.sharedBy": "it is always 8 requests",
    "pods.warmup.timeout": "it is always 1 minute",
    "reliability.breaker.probes": "it is always 1 request",
    "replicas.interval": "it is always 10 ms",
    "security.jwt.leeway": "it is always 30 s",
    "security.jwt.refresh": "it is always 5 minutes",
    "telemetry.decisions.maxBytes": "it is always 64 MiB",
    "telemetry.tracing.timeout": "it is always 5 s",
    "approx-prefix-cache-producer.maxSiblings": "it is always 16 requests",
    "approx-prefix-cache-producer.ttl": "it is always 1 hour",
    "predicted-latency-pd-decider.nonCachedTokens": (
        "predictions always decide; prefix-based-pd-decider has a fixed number of tokens"
    ),
    "predicted-latency-producer.maxRelativeError": (
        "predictions are always used; alert on kvlane_latency_prediction_error_ratio instead"
    ),
    "token-producer.local.cacheBytes": "it is always 64 MiB",
    "token-producer.pod.timeout": "it is always 300 ms",
    "tokenizer.local.cacheBytes": "it is always 64 MiB",
    "tokenizer.pod.timeout": "it is always 300 ms",
}
"""By the path of the key: `*` stands for a name that the configuration chooses. A path that begins with the type of a
plugin is below the plugin's parameters. Add a key here, and to docs/changelog.md, when a setting is removed."""

_POOL = re.compile(r"^pools\.[^.]+\.")
_NAMES = tuple((re.compile(re.escape(key).replace(r"\*", "[^.]+")), why) for key, why in REMOVED.items())


def replacement(path: str) -> str | None:
    """What holds in place of the setting at this path, or None if there was none. The path of a plugin's parameter
    begins with the type of the plugin."""
    path = _POOL.sub("", path)
    return next((why for key, why in _NAMES if key.fullmatch(path)), None)
