"""The `pods` section: static pods, discovery, scrapes and warm-up."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal
from urllib.parse import urlsplit

from proxy.core.endpoint import RANK_LABEL, SIZE_LABEL, Endpoint, PodTls
from proxy.core.errors import Problem
from proxy.core.params import Duration, param
from proxy.fleet.dialects import DEFAULT_ENGINE, Engine
from proxy.kubernetes.settings import ApiServer
from proxy.telemetry.exposition import parse_spec

_DEFAULT_PORTS = {"http": 80, "https": 443}

MOST_RANKS = 1024

HOST_NAME, HOST_ADDRESS = "kubernetes.io/hostname", "status.hostIP"
"""Labels of a pod that say where it runs; the second is its own field where Kubernetes says it."""


@dataclass(frozen=True, slots=True)
class DataParallelSettings:
    """Data-parallel ranks behind one port: each is an endpoint of its own."""

    size: int | None = param(
        None,
        "Ranks of the pod; 1: the pod is one endpoint. Read from its metrics unless given.",
        at_least=1,
        at_most=MOST_RANKS,
    )


@dataclass(frozen=True, slots=True)
class PodSettings:
    """One pod as it is wanted, whoever wants it: a file, a name server or an operator."""

    url: str = param(doc="base URL of the engine's server")
    name: str = param("", "what the pod is called in headers, logs and metrics; host:port of the URL unless given")
    role: str = param("", "prefill, decode or a compound of them; the label llm-d.ai/role says the same")
    labels: Mapping[str, str] = param({}, "what filters select by")
    weight: float = param(1.0, "share of the traffic where nothing else decides", more_than=0)
    models: tuple[str, ...] = param((), "the models it serves; the pod is asked unless given")
    engine: Engine = param(DEFAULT_ENGINE, "whose metrics it exposes")
    api_key: str | None = param(None, "sent to the pod as its bearer token")
    tls: PodTls | None = param(None, "how its https URL is spoken to; as pods.tls says unless given")
    uid: str = param("", "tells it from an earlier pod of the same name: with another one it is a new pod")
    data_parallel: DataParallelSettings | None = param(
        None, "Data-parallel ranks behind the pod's port; read from its metrics unless given."
    )

    ports: str = param(
        "",
        "Ports of data-parallel ranks with a port each, such as 8000-8007: each is a pod, named NAME-rank-0 and so on.",
    )

    @property
    def ranks_declared(self) -> int | None:
        """The number of ranks behind the pod's port, as the settings or the pod's label have it."""
        if self.data_parallel is not None and self.data_parallel.size is not None:
            return self.data_parallel.size
        labelled = self.labels.get(SIZE_LABEL, "")
        return int(labelled) if labelled.isdecimal() and 0 < int(labelled) <= MOST_RANKS else None

    def expanded(self) -> tuple[PodSettings, ...]:
        """Return a pod for each of `ports`; the pod itself without them."""
        if not self.ports:
            return (self,)
        parts = urlsplit(self.url)
        base = f"{parts.scheme}://{bracketed(parts.hostname or '')}"
        return tuple(
            replace(
                self,
                url=f"{base}:{port}{parts.path}",
                name=f"{self.name}-rank-{rank}",
                labels={**self.labels, RANK_LABEL: str(rank)},
                ports="",
            )
            for rank, port in enumerate(_ports(self.ports))
        )

    def __post_init__(self) -> None:
        """Raises ValueError for a URL or a range of ports that is none."""
        host, port = _check_url(self.url)
        if self.ports and urlsplit(self.url).port is not None:
            raise ValueError(f"url: {self.url!r} has a port beside ports; leave it out")
        _ports(self.ports)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        object.__setattr__(self, "name", self.name or (host if self.ports else f"{host}:{port}"))
        object.__setattr__(self, "api_key", self.api_key or None)


@dataclass(frozen=True, slots=True)
class DnsSettings:
    """A pod for every address of a name; all other keys are what each of them is like."""

    name: str = param(doc="the name to look up")
    port: int = param(doc="the port of every pod", at_least=1, at_most=65535)
    scheme: Literal["http", "https"] = param("http", "of every pod's URL")
    interval: Duration = param(Duration(5.0), "between two lookups", more_than=0)
    role: str = param("", "of every pod")
    labels: Mapping[str, str] = param({}, "of every pod")
    weight: float = param(1.0, "of every pod", more_than=0)
    models: tuple[str, ...] = param((), "of every pod; they are asked unless given")
    engine: Engine = param(DEFAULT_ENGINE, "of every pod")
    api_key: str | None = param(None, "of every pod")
    data_parallel: DataParallelSettings | None = param(None, "Data-parallel ranks behind the port of every pod.")

    def pod(self, address: str) -> PodSettings:
        return PodSettings(
            url=f"{self.scheme}://{bracketed(address)}:{self.port}",
            role=self.role,
            labels=self.labels,
            weight=self.weight,
            models=self.models,
            engine=self.engine,
            api_key=self.api_key,
            data_parallel=self.data_parallel,
        )


@dataclass(frozen=True, slots=True)
class DcgmSettings:
    """Where NVIDIA's DCGM exporter says how busy a pod's GPUs are."""

    port: int = param(9400, "of the exporter", at_least=1, at_most=65535)
    path: str = param("/metrics", "where it exposes its metrics")
    scheme: Literal["http", "https"] = param("http", "it is asked by")
    on_node: bool = param(False, "one for each node, not one beside each pod")
    interval: Duration | None = param(None, "between two answers; null: as often as the pod is asked", more_than=0)

    def url_of(self, endpoint: Endpoint) -> str:
        host = bracketed(urlsplit(endpoint.url).hostname or "")
        if self.on_node:
            host = bracketed(endpoint.labels.get(HOST_ADDRESS, "")) or endpoint.labels.get(HOST_NAME, "") or host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    interval: Duration = param(Duration(0.25), "between two scrapes of a pod, while maxCore allows it", more_than=0)
    timeout: Duration = param(Duration(1.0), "for one answer of a pod", more_than=0)
    max_core: float = param(0.05, "share of one core that all scrapes together may take", more_than=0, at_most=1)
    attributes: Mapping[str, str] = param({}, "further values to scrape: key -> name{label=value}")
    path: str = param("/metrics", "where a pod exposes its metrics")
    port: int | None = param(None, "of the metrics; the pod's own unless given", at_least=1, at_most=65535)
    scheme: Literal["http", "https"] | None = param(None, "of the metrics; the pod's own unless given")
    dcgm: DcgmSettings | None = param(
        None, "an exporter that is asked for the attribute GPUUtilization, too; null: nobody is asked"
    )

    def metrics_url(self, pod_url: str) -> str:
        """Where the pod of this base URL is scraped."""
        if self.port is None and self.scheme is None:
            return pod_url + self.path
        parts = urlsplit(pod_url)
        port = self.port or parts.port or _DEFAULT_PORTS[parts.scheme]
        return f"{self.scheme or parts.scheme}://{bracketed(parts.hostname or '')}:{port}{self.path}"

    def __post_init__(self) -> None:
        """Raises ValueError for an attribute that is no metric."""
        for text in self.attributes.values():
            parse_spec(text)


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """Off unless `prompts` is more than 0. System prompts and tools of requests are then kept in memory."""

    prompts: int = param(
        0, "Shared system prompts, per model, that a new or restarted pod gets; 0 switches warm-up off.", at_least=0
    )


@dataclass(frozen=True, slots=True)
class PodSources:
    static: tuple[PodSettings, ...] = param((), "pods that are there from the start")
    file: str | None = param(None, "a YAML list of pods, watched for changes")
    dns: DnsSettings | None = param(None, "a name whose addresses are pods")
    kubernetes: KubernetesSettings | None = param(None, "pods of a cluster")
    tls: PodTls = field(default_factory=PodTls)
    refresh: RefreshSettings = field(default_factory=RefreshSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)

    @property
    def has_source(self) -> bool:
        """Whether any pod can come of it."""
        return bool(self.static or self.finds)

    @property
    def finds(self) -> bool:
        """Whether pods are found by themselves."""
        return bool(self.file or self.dns or self.kubernetes)

    @property
    def most(self) -> int:
        """Pods that there can be; 0 where they are found by themselves."""
        return 0 if self.finds else len(self.static)

    def __post_init__(self) -> None:
        """Raises ValueError for pods that cannot be told apart."""
        object.__setattr__(self, "static", tuple(chain.from_iterable(pod.expanded() for pod in self.static)))
        if problems := duplicates(self.static, "static"):
            raise ValueError("; ".join(map(str, problems)))


def duplicates(pods: Sequence[PodSettings], path: str = "") -> list[Problem]:
    """A problem for every name and URL that an earlier pod has."""
    problems: list[Problem] = []
    first: dict[tuple[str, str], int] = {}
    for index, pod in enumerate(pods):
        for key, value in (("name", pod.name), ("url", pod.url)):
            other = first.setdefault((key, value), index)
            if other != index:
                problems.append(Problem(f"{path}[{index}].{key}", f"'{value}' is taken by {path}[{other}]"))
    return problems


def bracketed(host: str) -> str:
    """The host as it stands in a URL: an IPv6 address in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def _ports(text: str) -> list[int]:
    """Return the ports of `8000-8007`, or of several such separated by commas. Raises ValueError."""
    ports: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = (side.strip() for side in part.partition("-"))
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"ports: {text!r} are none; write 8000-8007 or 8000,8002")
        low, high = int(first), int(last or first)
        if not 0 < low <= high < 65536 or high - low >= MOST_RANKS:
            raise ValueError(f"ports: {part.strip()!r} is no range of ports; write 8000-8007")
        ports.extend(range(low, high + 1))
    if len(set(ports)) < len(ports):
        raise ValueError(f"ports: {text!r} has a port twice")
    return ports


def _check_url(url: str) -> tuple[str, int]:
    """Host as in a URL, and port. Raises ValueError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"url: {url!r} is no URL of a pod: {error}") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"url: {url!r} is no URL of a pod; write http://host:port")
    if parts.path.rstrip("/") == "/v1":
        raise ValueError(f"url: {url!r} ends in /v1, with which the paths of requests begin; leave it out")
    if "?" in url or "#" in url:
        raise ValueError(f"url: {url!r} has a query or a fragment; leave it out")
    if "@" in parts.netloc:
        raise ValueError("url: credentials do not belong into a URL; write apiKey")
    if any(sign <= " " for sign in url):
        raise ValueError(f"url: {url!r} has spaces in it")
    return bracketed(parts.hostname), port or _DEFAULT_PORTS[parts.scheme]


_KEY = r"(?:[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?)?"
_SET = rf"\(\s*{_VALUE}(?:\s*,\s*{_VALUE})*\s*\)"
_REQUIREMENT = rf"\s*(?:!?\s*{_KEY}|{_KEY}\s*(?:==?|!=)\s*{_VALUE}|{_KEY}\s+(?:not)?in\s*{_SET})\s*"
_SELECTOR = re.compile(rf"{_REQUIREMENT}(?:,{_REQUIREMENT})*")


@dataclass(frozen=True, slots=True)
class KubernetesSettings(ApiServer):
    """A pod for every ready pod of a cluster that is not about to end; those that end are drained. What labels and
    annotations of a pod say goes before what stands here."""

    selector: str = param("", "of labels: the pods themselves, or those whose labels count where a service says who")
    service: str = param("", "whose EndpointSlices say which pods there are")
    inference_pool: str = param("", "InferencePool whose selector and target ports say it")
    ports: tuple[int, ...] = param(
        (), "of every pod, each a pod of its own; those of the service or InferencePool unless given, else 8000"
    )
    scheme: Literal["http", "https"] = param("http", "of every pod's URL")
    role: str = param("", "of pods without a label llm-d.ai/role")
    labels: Mapping[str, str] = param({}, "of every pod, beside its own")
    weight: float = param(1.0, "of pods without an annotation kvlane/weight", more_than=0)
    models: tuple[str, ...] = param((), "of pods without an annotation kvlane/models; they are asked unless given")
    engine: Engine = param(DEFAULT_ENGINE, "of pods without a label llm-d.ai/engine-type")
    api_key: str | None = param(None, "of every pod")
    data_parallel: DataParallelSettings | None = param(None, "Data-parallel ranks behind one port of every pod.")

    def __post_init__(self) -> None:
        """Raises ValueError for what names no pods, or several sets of them."""
        ApiServer.__post_init__(self)
        if not (self.selector or self.service or self.inference_pool):
            raise ValueError("names no pods; write a selector, a service or an inferencePool")
        if self.inference_pool and (self.selector or self.service):
            raise ValueError("an inferencePool has a selector of its own; take selector and service out")
        if self.selector and not _SELECTOR.fullmatch(self.selector):
            raise ValueError(f"selector: {self.selector!r} is none; write app=vllm, tier in (a, b), !canary")
        if any(not 0 < port < 65536 for port in self.ports) or len(set(self.ports)) < len(self.ports):
            raise ValueError("ports: must be different ones from 1 to 65535")
