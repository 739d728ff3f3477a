"""Pods of a Kubernetes cluster: of a selector, of a service's EndpointSlices or of an InferencePool."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.core.endpoint import RANK_LABEL, ROLE_LABEL
from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks
from proxy.fleet.discovery import Source
from proxy.fleet.settings import HOST_ADDRESS, HOST_NAME, KubernetesSettings, PodSettings, found_pod
from proxy.kubernetes.api import RETRY, Api, Collection, Object, Resource, text, texts

log = logging.getLogger(__name__)


PODS = Resource("", "v1", "pods")
SLICES = Resource("discovery.k8s.io", "v1", "endpointslices")
POOLS = Resource("inference.networking.k8s.io", "v1", "inferencepools")

SERVICE_LABEL = "kubernetes.io/service-name"
"""The label of an EndpointSlice with the name of its service."""

ZONE = "topology.kubernetes.io/zone"
"""A label of nodes that is copied to their pods, as are the name and the address of the node."""

_OVER = ("Succeeded", "Failed")
"""Phases of a pod whose address another pod may already have."""

WEIGHT, MODELS = "kvlane/weight", "kvlane/models"
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Annotations; models and ports are separated by commas."""

_KEPT = (WEIGHT, MODELS, *ACTIVE_PORTS)
"""Annotations that are read; changes of other annotations are ignored."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod of the cluster. `wanted`: it is ready and not terminating. `born` orders pods with the same address. `uid`
    is unique in the cluster. `ports`: the ports of its EndpointSlice, if it has one."""

    name: str
    uid: str
    address: str
    wanted: bool
    born: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """`selector`: as the API server expects it in a list request."""

    selector: str
    ports: tuple[int, ...]


def read_pod(item: Object) -> PodSeen:
    metadata, status = item["metadata"], item.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    ready = conditions.get("Ready") == "True" and status.get("phase") not in _OVER
    annotations = metadata.get("annotations") or {}
    address = text(status, "podIP")
    place = _place(text(item.get("spec") or {}, "nodeName"), host=text(status, "hostIP"))
    return PodSeen(
        metadata["name"],
        text(metadata, "uid"),
        address,
        bool(ready and address and not metadata.get("deletionTimestamp")),
        text(metadata, "creationTimestamp"),
        {**place, **texts(metadata, "labels")},
        {key: text(annotations, key) for key in _KEPT if key in annotations},
    )


def read_slice(item: Object) -> tuple[PodSeen, ...]:
    """Return the endpoints of an EndpointSlice. They get the labels of the slice, which are the labels of the service.
    All pods of a slice have the same ports: during a rollout that changes a port number there are two slices."""
    metadata = item["metadata"]
    labels = texts(metadata, "labels")
    own = {
        key: value
        for key, value in labels.items()
        if key != SERVICE_LABEL and not key.startswith("endpointslice.kubernetes.io/")
    }
    ports = tuple(_port(one["port"]) for one in item.get("ports") or () if one.get("port") and _is_tcp(one))
    return tuple(_endpoints(item.get("endpoints") or (), own, text(metadata, "creationTimestamp"), ports))


def read_pool(item: Object) -> PoolSeen:
    spec = item["spec"]
    labels = texts(spec.get("selector") or {}, "matchLabels")
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return PoolSeen(selector, tuple(_port(one["number"]) for one in spec.get("targetPorts") or ()))


def _port(value: object) -> int:
    if not isinstance(value, int) or not 0 < value < 65536:
        raise ValueError(f"{value!r:.80} is not a port")
    return int(value)


def _endpoints(items: Any, labels: Mapping[str, str], born: str, ports: tuple[int, ...]) -> Iterator[PodSeen]:
    """Yield the endpoints that have an address. A missing condition `ready` counts as true, a missing `terminating` as
    false."""
    for item in items:
        if not item.get("addresses"):
            continue
        conditions, target = item.get("conditions") or {}, item.get("targetRef") or {}
        ready = conditions.get("ready") is not False and not conditions.get("terminating")
        address = text({"address": item["addresses"][0]}, "address")
        yield PodSeen(
            text(target, "name") or address,
            text(target, "uid"),
            address,
            bool(address) and ready,
            born,
            {**labels, **_place(text(item, "nodeName"), text(item, "zone"))},
            ports=ports,
        )


def _place(node: str = "", zone: str = "", host: str = "") -> dict[str, str]:
    return {key: value for key, value in ((HOST_NAME, node), (ZONE, zone), (HOST_ADDRESS, host)) if value}


def _is_tcp(port: Mapping[str, Any]) -> bool:
    return (port.get("protocol") or "TCP") == "TCP"


DEFAULT_PORTS = (8000,)

_SETTLE = 0.1
"""Seconds for which changes are collected."""

Made = tuple[PodSeen, tuple[int, ...], tuple[PodSettings, ...]]


class KubernetesSource(Source):
    """Watches a cluster; an `async with` context. While the API server fails, the known pods stay."""

    name = "kubernetes"
    interval = _SETTLE

    def __init__(self, settings: KubernetesSettings, clock: Clock, rng: Random, retry: float = RETRY) -> None:
        self._settings = settings
        self._retry = retry
        self._api = Api(settings)
        self._clock = clock
        self._random = rng
        self._tasks = Tasks()
        self._news = asyncio.Event()
        self._pods: Collection[PodSeen] | None = None
        self._slices: Collection[tuple[PodSeen, ...]] | None = None
        self._pools: Collection[PoolSeen] | None = None
        self._watched: tuple[str, asyncio.Task[None]] | None = None
        """The selector of the pods of an InferencePool, and the task that watches them."""
        self._made: dict[str, Made] = {}

    async def __aenter__(self) -> KubernetesSource:
        settings = self._settings
        if settings.inference_pool:
            only = {"fieldSelector": f"metadata.name={settings.inference_pool}"}
            self._pools = self._collection(POOLS, only, read_pool)
            self._tasks.keep(self._pools.run, "watch", str(POOLS))
        if settings.service:
            own = {"labelSelector": f"{SERVICE_LABEL}={settings.service}"}
            self._slices = self._collection(SLICES, own, read_slice)
            self._tasks.keep(self._slices.run, "watch", str(SLICES))
        if settings.selector:
            self._watch(settings.selector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()

    async def poll(self) -> Sequence[PodSettings] | None:
        """Wait until objects have changed or a watch has failed; then return the pods."""
        await self._news.wait()
        self._news.clear()
        if self._pools is not None:
            self._watch_pool(self._pools)
        needed = [one for one in (self._pools, self._slices, self._pods) if one is not None]
        if not all(one.listed for one in needed):
            return None
        ports, seen = self._seen()
        return self._settings_of(seen, ports)

    def _collection(self, resource: Any, query: Mapping[str, str], read: Any) -> Collection[Any]:
        return Collection(self._api, resource, query, read, self._news.set, self._clock, self._random, self._retry)

    def _watch(self, selector: str) -> None:
        """Watch the pods of this selector instead of the previous one."""
        if self._watched is not None:
            self._watched[1].cancel()
        self._pods = self._collection(PODS, {"labelSelector": selector}, read_pod)
        self._watched = (selector, self._tasks.keep(self._pods.run, "watch", str(PODS)))

    def _watch_pool(self, pools: Collection[PoolSeen]) -> None:
        """Watch the pods of the InferencePool. Without the object, or without a selector in it, there are no pods."""
        pool = pools.objects.get(self._settings.inference_pool)
        if pool is not None and pool.selector:
            if self._watched is None or self._watched[0] != pool.selector:
                self._watch(pool.selector)
            return
        if self._watched is not None:
            self._watched[1].cancel()
        self._watched = self._pods = None
        if pools.listed:
            what = "does not exist" if pool is None else "selects nothing"
            log.warning("InferencePool %s %s: it has no pods", self._settings.inference_pool, what)

    def _seen(self) -> tuple[tuple[int, ...], Iterable[PodSeen]]:
        """Return the ports of the InferencePool and the pods."""
        pods = None if self._pods is None else self._pods.objects
        if self._slices is not None:
            return (), _of_slices(self._slices.objects.values(), pods)
        pool = self._pools.objects.get(self._settings.inference_pool) if self._pools is not None else None
        return (() if pool is None else pool.ports), () if pods is None else pods.values()

    def _settings_of(self, seen: Iterable[PodSeen], ports: tuple[int, ...]) -> list[PodSettings]:
        """Return the pods. Of several with the same address and ports only the newest one counts: the cluster has not
        noticed the end of the others. Pods in the network of their node share its address but not its ports."""
        wanted = sorted((pod for pod in seen if pod.wanted), key=lambda pod: pod.born)
        by_place = {(pod.address, self._ports_of(pod, ports)): pod for pod in wanted}
        made: dict[str, Made] = {}
        for pod in by_place.values():
            before = self._made.get(pod.name)
            is_known = before is not None and before[:2] == (pod, ports)
            made[pod.name] = before if before and is_known else (pod, ports, self._made_of(pod, ports))
        self._made = made
        return [settings for name in sorted(made) for settings in made[name][2]]

    def _ports_of(self, pod: PodSeen, ports: tuple[int, ...]) -> tuple[int, ...]:
        return self._settings.ports or pod.ports or ports or DEFAULT_PORTS

    def _made_of(self, pod: PodSeen, ports: tuple[int, ...]) -> tuple[PodSettings, ...]:
        """Return a pod for each active port, named as in llm-d."""
        active, ports = _ports(pod), self._ports_of(pod, ports)
        name = f"{self._settings.namespace}/{pod.name}" if self._settings.namespace else pod.name
        names = {port: f"{name}-rank-{rank}" for rank, port in enumerate(ports)} if len(ports) > 1 else {ports[0]: name}
        try:
            made = {port: self._pod(pod, names[port], port) for port in ports if active is None or port in active}
        except ValueError as error:
            log.warning("skipping pod %s: %s", name, error)
            return ()
        if len(ports) == 1:
            return tuple(made.values())
        ranks = {port: {RANK_LABEL: str(rank)} for rank, port in enumerate(ports)}
        return tuple(replace(one, labels={**one.labels, **ranks[port]}) for port, one in made.items())

    def _pod(self, pod: PodSeen, name: str, port: int) -> PodSettings:
        settings = self._settings
        models = tuple(model.strip() for model in pod.annotations.get(MODELS, "").split(",") if model.strip())
        return found_pod(
            settings,
            pod.address,
            port,
            name=name,
            uid=pod.uid,
            role="" if ROLE_LABEL in pod.labels else settings.role,
            labels={**settings.labels, **pod.labels},
            weight=_weight(pod) or settings.weight,
            models=models or settings.models,
        )


def _of_slices(slices: Iterable[Iterable[PodSeen]], pods: Mapping[str, PodSeen] | None) -> Iterable[PodSeen]:
    """Return the endpoints of all slices. A pod may be in several slices: while it moves to another one, and in one for
    each address family. If `pods` are watched too, only endpoints of these count, because the role of others is
    unknown."""
    found: dict[str, PodSeen] = {}
    for one in slices:
        for endpoint in one:
            known = found.get(endpoint.name)
            if known is None or _rank(endpoint) > _rank(known):
                found[endpoint.name] = endpoint
    if pods is None:
        return found.values()
    both = ((endpoint, pods.get(endpoint.name)) for endpoint in found.values())
    return [_merged(endpoint, pod) for endpoint, pod in both if pod and pod.uid == endpoint.uid]


def _rank(endpoint: PodSeen) -> tuple[bool, bool]:
    return endpoint.wanted, ":" not in endpoint.address


def _merged(endpoint: PodSeen, pod: PodSeen) -> PodSeen:
    """Return the endpoint with the labels and annotations of its pod. The endpoint decides the readiness, because a
    service may publish pods that are not ready."""
    return replace(endpoint, labels={**endpoint.labels, **pod.labels}, annotations=pod.annotations, born=pod.born)


def _ports(pod: PodSeen) -> frozenset[int] | None:
    """Return the ports of the pod's annotation; None: all ports."""
    texts = (pod.annotations[key] for key in ACTIVE_PORTS if key in pod.annotations)
    text = next(texts, None)
    return None if text is None else frozenset(int(port) for port in text.split(",") if port.strip().isdecimal())


def _weight(pod: PodSeen) -> float | None:
    text = pod.annotations.get(WEIGHT, "")
    try:
        weight = float(text or 0)
    except ValueError:
        weight = 0.0
    if text and not 0 < weight < math.inf:
        log.warning("pod %s: the annotation %s is not a weight: %r", pod.name, WEIGHT, text)
        return None
    return weight or None
