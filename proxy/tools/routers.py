"""Import of command lines of vllm-router and sglang-router, whose flags are mostly the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from proxy.disagg.connectors import NAMES, connector_named
from proxy.prefix.kv_subscriptions import EVENTS_PORT
from proxy.tools import presets
from proxy.tools.imported import MANY, Converted, Found, Imported, converted, read_flags

POD_KEY = "POD_API_KEY"
CLIENT_KEY = "CLIENT_API_KEY"

_SECRET = re.compile("key|token|secret|password")
_HEADERS = {"consistent_hash": "x-session-id", "consistent_hashing": "x-smg-routing-key", "manual": "x-smg-routing-key"}
_LOADS = {"queue-scorer": 1, "active-request-scorer": 1}
_CONNECTORS = {"nixl": "nixl", "mooncake": "mooncake"}


def sglang_router(words: Sequence[str]) -> Imported:
    """Import a command line of sglang-router. Raise as `vllm_router` does."""
    return vllm_router(words, "sglang-router", "sglang")


def vllm_router(words: Sequence[str], system: str = "vllm-router", engine: str = "") -> Imported:
    """Import a command line of vllm-router. Raise InvalidDocument, and ValueError for an invalid value."""
    imported = Imported(system)
    found, unknown = read_flags(words, ARITIES)
    for flag, uses in {**found, **unknown}.items():
        for values in uses:
            _one(imported, flag, values)
    _pods(imported, found, engine)
    if "--intra-node-data-parallel-size" in found:
        size = _last(found, "--intra-node-data-parallel-size")
        if not size.isdecimal() or not int(size):
            raise ValueError(f"--intra-node-data-parallel-size: {size!r} is no number of ranks")
        for pod in imported.sources if int(size) > 1 else ():
            pod["dataParallel"] = {"size": int(size)}
    if "--api-key" in found:
        for pod in imported.sources:
            pod["apiKey"] = f"${{{POD_KEY}}}"
        imported.note(f"put the key that pods want into {POD_KEY}")
        if engine:  # sglang-router requires the same key from clients
            imported.put("security.apiKeys", [{"name": "client", "key": f"${{{CLIENT_KEY}}}"}])
            imported.note(f"put the key that clients send into {CLIENT_KEY}")
    _placement(imported, found, engine)
    return imported


def _one(imported: Imported, flag: str, values: list[str]) -> None:
    if flag in SET:
        imported.put_converted(SET[flag], values[0], flag)
    elif flag in NEEDLESS:
        imported.needs_no(_spelt(flag, values), NEEDLESS[flag][1])
    elif flag in ("--prefill-policy", "--decode-policy"):
        _of_roles(imported, flag, values)
    elif flag in MISSING:
        imported.lacks(_spelt(flag, values), MISSING[flag][1])
    elif flag not in ARITIES:
        imported.lacks(_spelt(flag, values), "is not known to this import")
    elif flag == "--disable-retries":
        imported.put("reliability.retries.attempts", 1)
    elif flag == "--cors-allowed-origins":
        imported.put("security.cors.origins", values)
    elif flag == "--max-concurrent-requests" and (count := converted(int, values[0], flag)) > 0:  # negative: no limit
        imported.put("flowControl.maxConcurrent", count)


def _pods(imported: Imported, found: Found, engine: str) -> None:
    for urls in found.get("--worker-urls", []):
        for url in urls:
            imported.pod(url, engine=engine)
    for role in ("prefill", "decode"):
        for values in found.get(f"--{role}", []):
            if not values:
                raise ValueError(f"--{role} wants a URL")
            ports = [value for value in values[1:] if value.lower() != "none"]
            labels = {"kvlane/bootstrap-port": ports[0]} if ports else {}
            imported.pod(values[0], engine=engine, role=role, labels=labels)
    if "--selector" in found:
        selector = ",".join(pair for pairs in found["--selector"] for pair in pairs)
        port, namespace = (_last(found, f"--service-discovery-{what}") for what in ("port", "namespace"))
        number = converted(int, port, "--service-discovery-port") if port else None
        imported.cluster(selector, number, namespace, engine)
    elif "--service-discovery" in found:
        imported.lacks("--service-discovery", f"without --selector it says nothing of pods: {WITH_PODS}")
    if not imported.settings.get("pods"):
        imported.note(f"it names no pods: {WITH_PODS}")


def _last(found: Found, flag: str) -> str:
    return found[flag][-1][0] if flag in found else ""


def _placement(imported: Imported, found: Found, engine: str) -> None:
    if "--prefill" in found or "--decode" in found:
        _roles(imported, found, engine)
        return
    policy = _last(found, "--policy") or "cache_aware"
    what = f"--policy {policy}"
    if policy in ("round_robin", "random"):
        imported.put("scheduling", presets.picked_by(f"{policy.replace('_', '-')}-picker"))
    elif policy in ("power_of_two", "least_load"):
        imported.put("scheduling", presets.scored_by(_LOADS))
        imported.note(f"{what}: all pods are compared here, not two of them")
    elif policy in _HEADERS or policy == "sticky_least_loaded":
        header = _HEADERS.get(policy, "x-session-id")
        imported.put("scheduling", presets.session(header))
        imported.note(f"{what}: the header {header} names the session; sessions leave a pod that is far behind")
    elif policy == "kv_aware":
        imported.put("scheduling", presets.exact())
        imported.note("install kvlane[precise]: placement follows KV events")
        _event_ports(imported, found)
    elif policy == "cache_aware":
        imported.needs_no(what, "placement considers cached prefixes and load by default")
    else:
        imported.lacks(what, "placement is by predicted time instead, cached prefixes included")


def _roles(imported: Imported, found: Found, engine: str) -> None:
    given = _last(found, "--kv-connector") or "nixl"
    connector = "sglang" if engine else _CONNECTORS.get(given, "")
    if not connector:
        imported.lacks(f"--kv-connector {given}", f"connectors are {', '.join(NAMES)}")
        connector = "nixl"
    imported.put("disaggregation.connector", connector)
    imported.put("scheduling", presets.disaggregated(connector_named(connector).needs_pair))
    if "--policy" in found:
        _of_roles(imported, "--policy", found["--policy"][-1])


def _of_roles(imported: Imported, flag: str, values: Sequence[str]) -> None:
    """Time that is predicted counts what these go by: cached prefixes, and load."""
    say = imported.needs_no if values[0] in ("cache_aware", "power_of_two", "least_load") else imported.lacks
    say(f"{flag} {values[0]}", OF_ROLES)


def _event_ports(imported: Imported, found: Found) -> None:
    """Parse `URL=tcp://host:port`; further ranks follow after commas."""
    for values in found.get("--kv-event-source", []):
        for value in values:
            url, _, endpoints = value.partition("=")
            ports = [urlsplit(endpoint).port for endpoint in endpoints.split(",")]
            labels = {EVENTS_PORT: str(ports[0])}
            if len(ports) > 1:
                labels["kvlane/data-parallel-size"] = str(len(ports))
            imported.pod(url, labels=labels)


def _spelt(flag: str, values: Sequence[str]) -> str:
    return " ".join([flag, *values]) if not _SECRET.search(flag) else flag


SET: Mapping[str, Converted] = {
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
    "--dp-aware": (0, "data-parallel ranks are found in the metrics of pods; dataParallel.size declares them"),
    "--enable-igw": (0, "models are read from the pods, and requests go to pods with their model"),
    "--kv-event-block-size": (1, "pods say it themselves"),
    "--cb-success-threshold": (
        1,
        "one good response closes a breaker; the pod's share then grows over breaker.slowStart",
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
    "--intra-node-data-parallel-size": 1,
}
ARITIES = {
    **dict.fromkeys(SET, 1),
    **{flag: arity for flag, (arity, _) in {**NEEDLESS, **MISSING}.items()},
    **READ_HERE,
}
