"""Findings of `kvlane doctor`: observations of pods, the problems of each, and a configuration for them. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from proxy.core.endpoint import Metrics
from proxy.disagg.connectors import connector_named
from proxy.fleet.dialects import DEFAULT_ENGINE
from proxy.http.upstream.pool import IDLE_LIMIT
from proxy.prefix.kv_subscriptions import EVENTS_PORT
from proxy.tools import presets

METRICS_PATH = "/metrics"

IS_KVLANE = "this is a kvlane, not a pod"

SKEW = 2.0
"""Tolerated difference of clocks in seconds; the resolution of the Date header is one."""
SLOW_TOKENIZE = 0.05
SLOW_METRICS = 0.1
SLOW_ABORT = 1.0


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAULT = "fault"


OK, NOTE, WARNING, FAULT = Level


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding about the pod with this URL, or about all pods without a URL; `fix` is empty if all is well."""

    pod: str
    check: str
    level: Level
    text: str
    fix: str = ""

    @property
    def is_bad(self) -> bool:
        return self.level in (WARNING, FAULT)


Results = Iterator[tuple[Level, str, str]]


def of_pod(seen: PodReport) -> list[Finding]:
    if seen.unreachable == IS_KVLANE:
        return [Finding(seen.url, "reachable", FAULT, IS_KVLANE, "give the URLs of its pods: `kvlane top` lists them")]
    if seen.unreachable:
        fix = "start the engine, or correct the URL, the port, or the network between this machine and the pod"
        if "SSL" in seen.unreachable:
            fix = "if the port speaks no TLS, write http://"
        return [Finding(seen.url, "reachable", FAULT, seen.unreachable, fix)]
    return [
        Finding(seen.url, check, level, text, fix) for check, say in _CHECKS.items() for level, text, fix in say(seen)
    ]


def of_fleet(pods: Sequence[PodReport]) -> list[Finding]:
    """Yield the findings that need a comparison of pods that serve the same model."""
    pods = [pod for pod in pods if not pod.unreachable]
    found = []
    for model in dict.fromkeys(model for pod in pods for model in pod.models):
        same = [pod for pod in pods if model in pod.models]
        for check, level, values, fix in _compared(same):
            if len(set(values)) > 1:
                values_of = ", ".join(f"{pod.url} {value or 'none'}" for pod, value in zip(same, values, strict=True))
                found.append(Finding("", check, level, f"pods of {model} differ: {values_of}", fix))
    return found


def _compared(pods: Sequence[PodReport]) -> Iterator[tuple[str, Level, list[Any], str]]:
    yield "version", NOTE, [pod.version for pod in pods], ""
    sizes = [pod.exposition.metrics.block_size if pod.exposition else 0 for pod in pods]
    fix = "give all of them the same --block-size, if they transfer KV caches to each other"
    yield "block-size", NOTE, sizes, fix
    lengths = [pod.max_model_len for pod in pods]
    fix = "give all of them the same --max-model-len: one pod accepts what another refuses"
    yield "context", WARNING, lengths, fix
    paths = [pod.metrics_path for pod in pods]
    yield "metrics", WARNING, paths, "pods.refresh.path is the same for all pods of a pool: configure two pools"
    connectors = [pod.transfer.connector or pod.transfer.unknown for pod in pods]
    fix = "configure one --kv-transfer-config for all pods of a pool"
    yield "connector", FAULT, connectors, fix


def _health(seen: PodReport) -> Results:
    if seen.health != 200:
        fix = "set reliability.health.path to what is 200 while the pod is well, or to null"
        yield FAULT, f"/health returns {seen.health}", fix
    if not seen.models:
        fix = "list its models under pods.static[].models; if the pod wants a key, give --api-key"
        yield WARNING, "/v1/models lists no model", fix
    elif seen.health == 200:
        yield OK, f"serves {', '.join(seen.models)}", ""


def _engine(seen: PodReport) -> Results:
    found = seen.exposition
    if found is None:
        fix = "do not start vLLM with --disable-log-stats; for other ports or paths see pods.refresh.port and path"
        yield FAULT, "/metrics has no metric of a known engine, so placement does not see the load of the pod", fix
        return
    version = f" {seen.version}" if seen.version else ", which does not say its version"
    yield OK, f"{found.engine}{version}", ""


def _metrics(seen: PodReport) -> Results:
    if (found := seen.exposition) is None:
        return
    for part in found.missing:
        what = "the size of its cache is guessed" if part == CACHE else f"'{part}' counts as 0"
        yield (
            WARNING,
            f"its metrics lack {part}: {what}",
            "upgrade the engine, or describe its metrics in engineConfigs of core-metrics-extractor",
        )
    if found.old:
        yield NOTE, f"it uses older names, which are read too: {', '.join(found.old)}", ""
    if found.seconds > SLOW_METRICS:
        fix = "raise pods.refresh.interval"
        yield WARNING, f"{seen.metrics_path} takes {found.seconds * 1e3:.0f} ms ({found.size} bytes)", fix
    elif not found.missing:
        yield OK, f"{seen.metrics_path} has all that is read: {found.size} bytes in {found.seconds * 1e3:.0f} ms", ""


def _caching(seen: PodReport) -> Results:
    how = {
        "vllm": "start the engine with --enable-prefix-caching",
        "sglang": "start the engine without --disable-radix-cache",
    }.get(seen.engine, "enable the prefix caching of the engine")
    fix = f"{how}: without it no placement saves any work"
    if seen.says_caching is False:
        yield FAULT, "prefix caching is off", fix
        return
    tried = seen.caching
    if tried is None or tried.refused:
        why = tried.refused if tried else "not tried"
        yield NOTE, f"prefix caching: {why}" + (", but the engine says it is on" if seen.says_caching else ""), ""
        return
    if not (tried.reported or tried.counted):
        yield FAULT, f"a prompt of {tried.prompt_tokens} tokens, sent again, was computed again", fix
        return
    count = tried.reported or tried.counted
    yield OK, f"{count:.0f} of {tried.prompt_tokens} tokens of a repeated prompt were cached", ""
    if tried.reported is None:
        flags = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}
        more = f"start the engine with {flags[seen.engine]}" if seen.engine in flags else ""
        yield NOTE, "responses do not report cached tokens, so kvlane learns less from them", more


def _blocks(seen: PodReport) -> Results:
    if seen.exposition and (size := seen.exposition.metrics.block_size):
        blocks = seen.exposition.metrics.blocks
        yield OK, f"{size} tokens a block, {blocks} blocks: {size * blocks} tokens of KV cache", ""


def _ranks(seen: PodReport) -> Results:
    number = len(seen.exposition.ranks) if seen.exposition else 0
    if number < 2:
        return
    tried, what = seen.ranks, f"{number} data-parallel ranks"
    if tried is None or not (tried.named or tried.others):
        yield NOTE, f"{what}: whether requests can choose one was not seen", ""
    elif tried.named >= tried.others:
        yield OK, f"{what}, each an endpoint: requests go to the rank that they name", ""
    else:
        fix = "upgrade the engine; until then the pod is one endpoint: write dataParallel: {size: 1}"
        yield WARNING, f"{what}, and it ignores which of them a request names", fix


def _events(seen: PodReport) -> Results:
    if (found := seen.events) is None or seen.engine not in ("vllm", "sglang"):
        return
    where = f"{found.host}:{found.port}"
    fix = (
        'optional, for exact placement: --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq",'
        ' "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
    )
    if found.speaks:
        yield OK, f"KV events are published on {where}", ""
        if found.replay is False:
            yield WARNING, "its replay endpoint cannot be reached: events that are missed stay missed", fix
    elif found.announced:
        fix = "open the port to kvlane, and bind: an endpoint without * makes the engine connect, not listen"
        yield WARNING, f"the engine says that KV events are on {where}, but the port does not respond", fix
    else:
        yield NOTE, f"no KV events on {where}: its cache is matched approximately", fix


def _connector(seen: PodReport) -> Results:
    found = seen.transfer
    if found.unknown:
        yield WARNING, f"kvlane does not support its connector {found.unknown}", "see disaggregation.md"
    elif found.connector:
        role = f", role {found.role}" if found.role else ", and does not say its role"
        yield OK, f"transfers KV caches with {found.connector}{role}", ""
    if found.host in ("localhost", "127.0.0.1", "::1", "0.0.0.0"):
        fix = "set VLLM_NIXL_SIDE_CHANNEL_HOST to the pod's own address, unless all pods are on one host"
        yield WARNING, f"tells other pods to fetch KV caches from {found.host}", fix


def _abort(seen: PodReport) -> Results:
    if seen.abort is None:
        yield NOTE, "whether a request ends when its client leaves: not seen; try while the pod is idle", ""
    elif seen.abort > SLOW_ABORT:
        fix = "connect kvlane to the engine itself, without a proxy in between that keeps reading"
        took = "goes on" if math.isinf(seen.abort) else f"ends {seen.abort:.1f} s later"
        yield FAULT, f"a request whose client has left {took}: it wastes GPU time", fix
    else:
        yield OK, f"a request ended {seen.abort * 1e3:.0f} ms after its client left", ""


def _clock(seen: PodReport) -> Results:
    if seen.skew is None:
        yield NOTE, "its responses have no Date header: its clock was not compared", ""
    elif abs(seen.skew) > SKEW:
        ahead = "ahead of" if seen.skew > 0 else "behind"
        fix = "run NTP on both: logs and traces of the two cannot be laid side by side"
        yield WARNING, f"its clock is {abs(seen.skew):.1f} s {ahead} this one", fix
    else:
        yield OK, "its clock agrees with this one, to a second or two", ""


def _keep_alive(seen: PodReport) -> Results:
    if seen.keep_alive is None:
        yield NOTE, "how long it keeps idle connections: not seen", ""
    elif seen.keep_alive <= IDLE_LIMIT:
        name = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" if seen.engine == "vllm" else "the keep-alive timeout of its server"
        fix = f"set {name} to 5 s or more: kvlane uses idle connections again for {IDLE_LIMIT:g} s"
        when = f"after {seen.keep_alive:.1f} s" if seen.keep_alive else "after every response"
        yield WARNING, f"it closes idle connections {when}: now and then a request meets one that closes", fix
    else:
        held = "longer than was watched" if math.isinf(seen.keep_alive) else f"{seen.keep_alive:.1f} s"
        yield OK, f"it keeps idle connections {held}", ""


def _tokenize(seen: PodReport) -> Results:
    if seen.tokenize is None:
        yield NOTE, "it has no /tokenize: exact placement needs token-producer with local", ""
    elif seen.tokenize > SLOW_TOKENIZE:
        fix = "for exact placement let token-producer tokenise locally, not ask pods"
        yield NOTE, f"/tokenize takes {seen.tokenize * 1e3:.0f} ms for a thousand tokens", fix
    else:
        yield OK, f"/tokenize takes {seen.tokenize * 1e3:.1f} ms for a thousand tokens", ""


_CHECKS: dict[str, Callable[[PodReport], Results]] = {
    "health": _health,
    "engine": _engine,
    "metrics": _metrics,
    "prefix-caching": _caching,
    "block-size": _blocks,
    "data-parallel": _ranks,
    "kv-events": _events,
    "connector": _connector,
    "abort": _abort,
    "clock": _clock,
    "keep-alive": _keep_alive,
    "tokenize": _tokenize,
}

CACHE = "cache_info"
"""The parts of a dialect that describe the size and number of KV blocks."""


@dataclass(frozen=True, slots=True)
class ExpositionFinding:
    """The metrics of a pod. `engine` is the dialect with the most matching names, `missing` are the parts of the
    dialect that the pod lacks, `old` the names that newer releases of the engine do not have any more."""

    engine: str
    metrics: Metrics
    size: int
    seconds: float
    missing: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the series that describes the cache."""
    connector: str = ""
    """The connector that the series belong to, in kvlane's name; empty if there are no such series."""
    counts_hits: bool = False
    """Whether it has a counter of prefix cache hits."""
    ranks: tuple[Metrics, ...] = ()
    """Metrics of the data-parallel ranks, if the pod has several."""


@dataclass(frozen=True, slots=True)
class Caching:
    """Result of sending a new prompt twice."""

    refused: str = ""
    """Reason for the failure; then the other fields are empty."""
    reported: int | None = None
    """Cached tokens in the response to the second request; None if the pod does not report them."""
    counted: float = 0.0
    """Growth of the pod's own hit counter, in tokens."""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ranks:
    """Result of requests that named one data-parallel rank: the growth of its counters and of all others'."""

    named: float
    others: float


@dataclass(frozen=True, slots=True)
class Events:
    """The address of published KV events; `speaks`: the port speaks ZMTP."""

    host: str
    port: int
    speaks: bool
    announced: bool = False
    """Whether /kv_event_sources reports the address; otherwise the port is a guess."""
    replay: bool | None = None
    """Whether missed events can be replayed; None if no replay port is announced."""


@dataclass(frozen=True, slots=True)
class TransferFinding:
    """P/D transfer: `connector` in kvlane's name, `role` prefill, decode or empty."""

    connector: str = ""
    role: str = ""
    unknown: str = ""
    """The engine's own name of a connector that is unknown to kvlane."""
    host: str = ""
    """The host from which other pods fetch."""


@dataclass(slots=True)
class PodReport:
    url: str
    unreachable: str = ""
    """Reason why the pod is unreachable; then the other fields are empty."""
    health: int = 0
    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    exposition: ExpositionFinding | None = None
    metrics_path: str = METRICS_PATH
    caching: Caching | None = None
    ranks: Ranks | None = None
    says_caching: bool | None = None
    events: Events | None = None
    transfer: TransferFinding = field(default_factory=TransferFinding)
    abort: float | None = None
    """Seconds from the client's disconnection to the end of the request on the pod; infinite if it continued."""
    skew: float | None = None
    """Seconds by which its clock is ahead."""
    keep_alive: float | None = None
    """Seconds after which the pod closes an idle connection; infinite if it was not closed during the probe."""
    tokenize: float | None = None
    """Median time of /tokenize, in seconds."""

    @property
    def engine(self) -> str:
        return self.exposition.engine if self.exposition else ""


def recommended(pods: Sequence[PodReport]) -> dict[str, Any]:
    """Return a configuration for the reachable pods, without defaults."""
    pods = [pod for pod in pods if not pod.unreachable]
    exact = bool(pods) and all(
        pod.engine == DEFAULT_ENGINE and pod.events and pod.events.speaks and pod.tokenize is not None for pod in pods
    )
    found: dict[str, Any] = {"pods": {"static": [_pod(pod, exact) for pod in pods]}}
    paths = {pod.metrics_path for pod in pods if pod.exposition}
    if len(paths) == 1 and (path := paths.pop()) != METRICS_PATH:
        found["pods"]["refresh"] = {"path": path}
    connectors = {pod.transfer.connector for pod in pods}
    if {"prefill", "decode"} <= {pod.transfer.role for pod in pods} and len(connectors) == 1 and "" not in connectors:
        connector = connectors.pop()
        found["disaggregation"] = {"connector": connector}
        found["scheduling"] = presets.disaggregated(connector_named(connector).needs_pair)
    elif exact:
        found["scheduling"] = presets.exact()
    if pods and any(pod.health != 200 for pod in pods):
        found["reliability"] = {"health": {"path": None}}
    return found


def _pod(seen: PodReport, exact: bool) -> dict[str, Any]:
    pod: dict[str, Any] = {"url": seen.url}
    if seen.engine not in ("", DEFAULT_ENGINE):
        pod["engine"] = seen.engine
    if seen.transfer.role:
        pod["role"] = seen.transfer.role
    if exact and seen.events and seen.events.port != presets.LISTENS:
        pod["labels"] = {EVENTS_PORT: str(seen.events.port)}
    return pod
