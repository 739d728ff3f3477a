"""The `pods` section: static pods, discovery, scrapes and warm-up."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal
from urllib.parse import urlsplit

from proxy.core.endpoint import RANK_LABEL, SIZE_LABEL, Endpoint, PodTls
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Duration, check_path, join, param
from proxy.fleet.dialects import DEFAULT_ENGINE, Engine
from proxy.kubernetes.settings import ApiServer
from proxy.telemetry.exposition import parse_spec

_DEFAULT_PORTS = {"http": 80, "https": 443}

MOST_RANKS = 1024

HOST_NAME, HOST_ADDRESS = "kubernetes.io/hostname", "status.hostIP"
"""Labels of a pod with its node. Kubernetes reports the second as a field of its own."""


@dataclass(frozen=True, slots=True)
class DataParallelSettings:
    """Data-parallel ranks behind one port: each is an endpoint of its own."""

    size: int | None = param(
        None,
        "number of ranks behind the port; 1: the pod is one endpoint; default: read from its metrics",
        at_least=1,
        at_most=MOST_RANKS,
    )


@dataclass(frozen=True, kw_only=True)  # no slots: a class can inherit them from one base only
class SharedPodSettings:
    """The settings of one pod, and of all pods that a discovery source finds."""

    role: str = param(
        "",
        "role of the pod: prefill, decode or encode, or several of them, as prefill-decode; default: its "
        "label llm-d.ai/role",
    )
    labels: Mapping[str, str] = param({}, "labels, for filters and scorers")
    weight: float = param(1.0, "relative share of the traffic where no scorer prefers a pod", more_than=0)
    models: tuple[str, ...] = param((), "models that the pod serves; default: what the pod lists at /v1/models")
    engine: Engine = param(DEFAULT_ENGINE, "engine of the pod, which decides how its metrics are read")
    api_key: str | None = param(None, "bearer token that kvlane sends to the pod")
    data_parallel: DataParallelSettings | None = param(
        None, "data-parallel ranks behind the pod's port; default: read from its metrics"
    )


@dataclass(frozen=True, slots=True)
class PodSettings(SharedPodSettings):
    """One pod, as a file, a discovery source or an operator describes it."""

    url: str = param(doc="base URL of the engine's server, without /v1")
    name: str = param("", "name of the pod in headers, logs and metrics; default: host:port of the URL")
    tls: PodTls | None = param(None, "TLS settings of the pod; default: pods.tls")
    uid: str = param(
        "",
        "unique id of the pod. A pod with the same name and another uid is a new pod, and what was learnt of "
        "the old one is dropped",
    )
    ports: str = param(
        "",
        "ports of data-parallel ranks that have a port each, such as 8000-8007; each becomes a pod NAME-rank-N",
    )

    @property
    def ranks_declared(self) -> int | None:
        """The number of ranks behind the pod's port by its settings or its label."""
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
        host, port = _check_url(self.url)
        if self.ports and urlsplit(self.url).port is not None:
            raise ValueError(f"url: {self.url!r} has a port beside ports; leave it out")
        _ports(self.ports)
        object.__setattr__(self, "url", self.url.rstrip("/"))
        object.__setattr__(self, "name", self.name or (host if self.ports else f"{host}:{port}"))
        object.__setattr__(self, "api_key", self.api_key or None)


def found_pod(source: DnsSettings | KubernetesSettings, address: str, port: int, **own: Any) -> PodSettings:
    """Return a pod at this address with the settings of the source that has found it, and its `own`."""
    shared = {item.name: getattr(source, item.name) for item in fields(SharedPodSettings)}
    return PodSettings(url=f"{source.scheme}://{bracketed(address)}:{port}", **{**shared, **own})


@dataclass(frozen=True, slots=True)
class DnsSettings(SharedPodSettings):
    """One pod for each address of a DNS name. The other keys apply to all of these pods."""

    name: str = param(doc="DNS name to look up")
    port: int = param(doc="port of the pods", at_least=1, at_most=65535)
    scheme: Literal["http", "https"] = param("http", "scheme of the URLs of the pods")
    interval: Duration = param(Duration(5.0), "time between two lookups", more_than=0)


@dataclass(frozen=True, slots=True)
class DcgmSettings:
    """The exporter of NVIDIA DCGM, which reports the utilization of a pod's GPUs."""

    port: int = param(9400, "port of the exporter", at_least=1, at_most=65535)
    path: str = param("/metrics", "path of the exporter's metrics")
    scheme: Literal["http", "https"] = param("http", "scheme of the exporter's URL")
    on_node: bool = param(False, "the exporter runs once per node instead of once per pod")
    interval: Duration | None = param(
        None, "time between two scrapes of the exporter; null: scrape it whenever the pod is scraped", more_than=0
    )

    def __post_init__(self) -> None:
        check_path(self.path)

    def url_of(self, endpoint: Endpoint) -> str:
        host = bracketed(urlsplit(endpoint.url).hostname or "")
        if self.on_node:
            host = bracketed(endpoint.labels.get(HOST_ADDRESS, "")) or endpoint.labels.get(HOST_NAME, "") or host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True)
class RefreshSettings:
    interval: Duration = param(
        Duration(0.25), "time between two scrapes of a pod; it grows where maxCore requires it", more_than=0
    )
    timeout: Duration = param(Duration(1.0), "timeout of one scrape", more_than=0)
    max_core: float = param(
        0.05, "largest share of one CPU core that all scrapes together may use", more_than=0, at_most=1
    )
    attributes: Mapping[str, str] = param(
        {}, "further values to scrape as endpoint attributes: name -> metric{label=value}"
    )
    path: str = param("/metrics", "path of the pods' metrics")
    port: int | None = param(None, "port of the pods' metrics; default: the port of the pod", at_least=1, at_most=65535)
    scheme: Literal["http", "https"] | None = param(None, "scheme of the metrics URL; default: the scheme of the pod")
    dcgm: DcgmSettings | None = param(None, "DCGM exporter to scrape for the attribute GPUUtilization; null: none")

    def metrics_url(self, pod_url: str) -> str:
        if self.port is None and self.scheme is None:
            return pod_url + self.path
        parts = urlsplit(pod_url)
        port = self.port or parts.port or _DEFAULT_PORTS[parts.scheme]
        return f"{self.scheme or parts.scheme}://{bracketed(parts.hostname or '')}:{port}{self.path}"

    def __post_init__(self) -> None:
        check_path(self.path)
        for text in self.attributes.values():
            try:
                parse_spec(text)
            except ValueError as error:
                raise ValueError(f"attributes: {error}") from None


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """Prefix warm-up. It is off unless `prompts` is above 0; then system prompts and tools of requests are kept in
    memory."""

    prompts: int = param(
        0,
        "number of shared system prompts per model that are sent to a new or restarted pod; 0: no warm-up",
        at_least=0,
    )


@dataclass(frozen=True, slots=True)
class PodSources:
    static: tuple[PodSettings, ...] = param((), "pods with fixed addresses")
    file: str | None = param(None, "YAML file with a list of pods; kvlane watches it for changes")
    dns: DnsSettings | None = param(None, "discover pods by a DNS name")
    kubernetes: KubernetesSettings | None = param(None, "discover pods with the Kubernetes API")
    tls: PodTls = field(default_factory=PodTls)
    refresh: RefreshSettings = field(default_factory=RefreshSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)

    @property
    def has_source(self) -> bool:
        return bool(self.static or self.finds)

    @property
    def finds(self) -> bool:
        return bool(self.file or self.dns or self.kubernetes)

    @property
    def most(self) -> int:
        """Largest number of pods; 0 where they are discovered."""
        return 0 if self.finds else len(self.static)

    def __post_init__(self) -> None:
        object.__setattr__(self, "static", tuple(chain.from_iterable(pod.expanded() for pod in self.static)))
        if problems := duplicates(self.static, "static"):
            raise ConfigError(problems)


def duplicates(pods: Sequence[PodSettings], path: str = "") -> list[Problem]:
    """Return a problem for every pod with the URL or the name of an earlier pod."""
    problems: list[Problem] = []
    first: dict[tuple[str, str], int] = {}
    for index, pod in enumerate(pods):
        for key, value in (("url", pod.url), ("name", pod.name)):
            other = first.setdefault((key, value), index)
            if other != index:
                earlier = f"{join('pods', path) if path else ''}[{other}]"
                problems.append(Problem(f"{path}[{index}].{key}", f"'{value}' is taken by {earlier}"))
                break
    return problems


def bracketed(host: str) -> str:
    """Return the host as in a URL: an IPv6 address in brackets."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host


def _ports(text: str) -> list[int]:
    """Return the ports of `8000-8007`, or of several ranges separated by commas. Raise ValueError."""
    ports: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = (side.strip() for side in part.partition("-"))
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"ports: {text!r} is not a list of ports; write 8000-8007 or 8000,8002")
        low, high = int(first), int(last or first)
        if not 0 < low <= high < 65536 or high - low >= MOST_RANKS:
            raise ValueError(f"ports: {part.strip()!r} is no range of ports; write 8000-8007")
        ports.extend(range(low, high + 1))
    if len(set(ports)) < len(ports):
        raise ValueError(f"ports: {text!r} has a port twice")
    return ports


def _check_url(url: str) -> tuple[str, int]:
    """Return host as in a URL, and port. Raise ValueError."""
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
class KubernetesSettings(ApiServer, SharedPodSettings):
    """One pod for each ready pod of a Kubernetes cluster; terminating pods are drained. The labels of a pod, such as
    llm-d.ai/role and llm-d.ai/engine-type, and its annotations kvlane/weight and kvlane/models take precedence over the
    keys here."""

    selector: str = param("", "label selector of the pods; with a service: of the pods whose labels are read")
    service: str = param("", "Service whose EndpointSlices list the pods")
    inference_pool: str = param("", "InferencePool that defines the selector and the target ports")
    ports: tuple[int, ...] = param(
        (),
        "ports of each pod; every port becomes a pod of its own. Default: the ports of the Service or "
        "InferencePool, else 8000",
    )
    scheme: Literal["http", "https"] = param("http", "scheme of the URLs of the pods")

    def __post_init__(self) -> None:
        ApiServer.__post_init__(self)
        if not (self.selector or self.service or self.inference_pool):
            raise ValueError("names no pods; write a selector, a service or an inferencePool")
        if self.inference_pool and (self.selector or self.service):
            raise ValueError("an inferencePool has a selector of its own; take selector and service out")
        if self.selector and not _SELECTOR.fullmatch(self.selector):
            raise ValueError(f"selector: {self.selector!r} is not a selector; write app=vllm, tier in (a, b), !canary")
        if any(not 0 < port < 65536 for port in self.ports) or len(set(self.ports)) < len(self.ports):
            raise ValueError("ports: must be different ones from 1 to 65535")
