"""The flags of vllm-router and sglang-router: what is set by which, and why others set nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.migration.words import MANY

SET: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "--host": ("listen.host", str),
    "--port": ("listen.port", int),
    "--max-payload-size": ("listen.maxBody", int),
    "--prometheus-port": ("admin.port", int),
    "--request-timeout-secs": ("reliability.timeouts.request", lambda text: f"{text}s"),
    "--retry-max-retries": ("reliability.retries.attempts", int),
    "--retry-initial-backoff-ms": ("reliability.retries.backoff.initial", lambda text: f"{text}ms"),
    "--retry-max-backoff-ms": ("reliability.retries.backoff.max", lambda text: f"{text}ms"),
    "--cb-failure-threshold": ("reliability.breaker.failures", int),
    "--cb-timeout-duration-secs": ("reliability.breaker.open", lambda text: f"{text}s"),
    "--cb-window-duration-secs": ("reliability.breaker.window", lambda text: f"{text}s"),
    "--health-failure-threshold": ("reliability.health.failures", int),
    "--health-success-threshold": ("reliability.health.successes", int),
    "--health-check-timeout-secs": ("reliability.health.timeout", lambda text: f"{text}s"),
    "--health-check-interval-secs": ("reliability.health.interval", lambda text: f"{text}s"),
    "--health-check-endpoint": ("reliability.health.path", str),
    "--queue-size": ("flowControl.maxQueued", int),
    "--queue-timeout-secs": ("flowControl.queueTimeout", lambda text: f"{text}s"),
    "--shutdown-grace-period-secs": ("reliability.drain.grace", lambda text: f"{text}s"),
    "--tls-cert-path": ("listen.tls.cert", str),
    "--tls-key-path": ("listen.tls.key", str),
    "--log-level": ("telemetry.logLevel", lambda text: {"warn": "warning", "critical": "error"}.get(text, text)),
}
_SAYS_ITSELF = "what a cached prefix saves is weighed against load in predicted seconds, with no threshold"
_SIZED = "the index is as large as the pods' own caches"
_STARTS = "pods may come and go at any time; nothing waits for them"
NEEDLESS: Mapping[str, tuple[int, str]] = {
    "--cache-threshold": (1, _SAYS_ITSELF),
    "--balance-abs-threshold": (1, _SAYS_ITSELF),
    "--balance-rel-threshold": (1, _SAYS_ITSELF),
    "--eviction-interval": (1, _SIZED),
    "--eviction-interval-secs": (1, _SIZED),
    "--max-tree-size": (1, _SIZED),
    "--worker-startup-timeout-secs": (1, _STARTS),
    "--worker-startup-check-interval": (1, _STARTS),
    "--vllm-pd-disaggregation": (0, "roles of pods say it"),
    "--pd-disaggregation": (0, "roles of pods say it"),
    "--enable-igw": (0, "pods are asked for their models, and requests go to those that have theirs"),
    "--kv-event-block-size": (1, "pods say it themselves"),
    "--cb-success-threshold": (
        1,
        "one good answer closes a breaker; the pod's share then grows over breaker.slowStart",
    ),
    "--model-path": (1, "prompts are tokenised where plugins ask for it: see token-producer"),
    "--tokenizer-path": (1, "prompts are tokenised where plugins ask for it: see token-producer"),
}
WITH_PODS = "list the pods, or see pods.kubernetes and pods.dns"
_BY_ROLE = "label pods with llm-d.ai/role, and name all of them by one selector under pods.kubernetes"
_ENGINE = "the engine does it: see its own flag"
_TRACES = "set telemetry.tracing.endpoint: OTLP over HTTP, which collectors mostly take on port 4318"
OF_ROLES = "both roles are scheduled by predicted time; see schedulingProfiles"
MISSING: Mapping[str, tuple[int, str]] = {
    "--prefill-selector": (MANY, _BY_ROLE),
    "--decode-selector": (MANY, _BY_ROLE),
    "--vllm-discovery-address": (1, f"pods do not register themselves: {WITH_PODS}"),
    "--retry-backoff-multiplier": (1, "each wait is twice the last"),
    "--retry-jitter-factor": (1, "half of each wait is by chance"),
    "--disable-circuit-breaker": (0, "breakers cannot be off; raise reliability.breaker.failures"),
    "--disable-health-check": (0, "set reliability.health.path to null"),
    "--rate-limit-tokens-per-second": (1, "limits are per key: see security.limits"),
    "--request-id-headers": (MANY, "x-request-id is read and sent"),
    "--log-dir": (1, "logs go to standard error, and the access log to standard output"),
    "--router-temperature": (1, "the best pod is taken; see weighted-random-picker"),
    "--dp-aware": (0, "list each rank as a pod of its own"),
    "--intra-node-data-parallel-size": (1, "list each rank as a pod of its own"),
    "--api-key-validation-urls": (MANY, "keys and tokens are under security"),
    "--prometheus-host": (1, "the admin port stays on loopback; set admin.host and admin.apiKey together"),
    "--prometheus-duration-buckets": (MANY, "buckets are fixed"),
    "--prefill-policy": (1, OF_ROLES),
    "--decode-policy": (1, OF_ROLES),
    "--kv-event-replay-source": (MANY, "replay ports are the label kvlane/kv-replay-port"),
    "--pd-kv-events": (MANY, "event ports are the label kvlane/kv-events-port"),
    "--mini-lb": (0, "there is one kind of proxy"),
    "--enable-trace": (0, _TRACES),
    "--otlp-traces-endpoint": (1, _TRACES),
    "--reasoning-parser": (1, _ENGINE),
    "--tool-call-parser": (1, _ENGINE),
    "--mcp-config-path": (1, "tools are the client's to call"),
    "--history-backend": (1, "conversations are not stored"),
    "--backend": (1, "pods speak HTTP in the shapes of OpenAI and Anthropic"),
    "--max-idle-secs": (1, "see sessionIdConfig.evictionTtlSeconds of session-affinity-scorer"),
    "--assignment-mode": (1, "a session's first pod is the one that scores best"),
    "--bucket-adjust-interval-secs": (1, "there are no buckets by length; see context-length-aware"),
}
READ_HERE = {
    "--worker-urls": MANY,
    "--policy": 1,
    "--prefill": MANY,
    "--decode": MANY,
    "--kv-connector": 1,
    "--kv-event-source": MANY,
    "--max-concurrent-requests": 1,
    "--disable-retries": 0,
    "--cors-allowed-origins": MANY,
    "--api-key": 1,
    "--service-discovery": 0,
    "--selector": MANY,
    "--service-discovery-port": 1,
    "--service-discovery-namespace": 1,
}
ARITIES = {
    **dict.fromkeys(SET, 1),
    **{flag: arity for flag, (arity, _) in {**NEEDLESS, **MISSING}.items()},
    **READ_HERE,
}
