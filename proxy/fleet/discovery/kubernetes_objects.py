"""What objects of Kubernetes say of pods: https://kubernetes.io/docs/reference/kubernetes-api/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.fleet.settings import HOST_ADDRESS, HOST_NAME
from proxy.kubernetes.api import Object, Resource

PODS = Resource("", "v1", "pods")
SLICES = Resource("discovery.k8s.io", "v1", "endpointslices")
POOLS = Resource("inference.networking.k8s.io", "v1", "inferencepools")

SERVICE_LABEL = "kubernetes.io/service-name"
"""Of an EndpointSlice."""

ZONE = "topology.kubernetes.io/zone"
"""A label of nodes, which their pods get here, as they get the node's name and address."""

_OVER = ("Succeeded", "Failed")
"""Phases of a pod whose address may be another's by now."""

WEIGHT, MODELS = "kvlane/weight", "kvlane/models"
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Annotations; models and ports are separated by commas."""

_KEPT = (WEIGHT, MODELS, *ACTIVE_PORTS)
"""Annotations that count; whatever else changes in an object is no change."""


@dataclass(frozen=True, slots=True)
class PodSeen:
    """`wanted`: it is ready, and is not about to end. `born` orders those of one address. `uid` is its own, as long as
    the cluster exists. `ports`: those of its slice; none where it is not of one."""

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
    """`selector` as a list is asked with it."""

    selector: str
    ports: tuple[int, ...]


def read_pod(item: Object) -> PodSeen:
    metadata, status = item["metadata"], item.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    ready = conditions.get("Ready") == "True" and status.get("phase") not in _OVER
    annotations = metadata.get("annotations") or {}
    address = status.get("podIP") or ""
    place = _place((item.get("spec") or {}).get("nodeName"), host=status.get("hostIP"))
    return PodSeen(
        metadata["name"],
        metadata.get("uid") or "",
        address,
        bool(ready and address and not metadata.get("deletionTimestamp")),
        metadata.get("creationTimestamp") or "",
        {**place, **(metadata.get("labels") or {})},
        {key: annotations[key] for key in _KEPT if key in annotations},
    )


def read_slice(item: Object) -> tuple[PodSeen, ...]:
    """Of labels, an endpoint has those of its slice, which are those of the service. A slice has one set of ports: pods
    whose ports of the same name have other numbers, as in a rollout that changes one, are in another."""
    metadata = item["metadata"]
    own = {key: value for key, value in (metadata.get("labels") or {}).items() if not _is_of_slices(key)}
    ports = tuple(one["port"] for one in item.get("ports") or () if one.get("port") and _is_tcp(one))
    born = metadata.get("creationTimestamp") or ""
    return tuple(_endpoints(item.get("endpoints") or (), own, born, ports))


def read_pool(item: Object) -> PoolSeen:
    spec = item["spec"]
    labels: Mapping[str, str] = (spec.get("selector") or {}).get("matchLabels") or {}
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return PoolSeen(selector, tuple(one["number"] for one in spec.get("targetPorts") or ()))


def _endpoints(items: Any, labels: Mapping[str, str], born: str, ports: tuple[int, ...]) -> Iterator[PodSeen]:
    """A condition that is not there counts as met, `terminating` as not. Who has no address is none."""
    for item in items:
        if not item.get("addresses"):
            continue
        conditions, target = item.get("conditions") or {}, item.get("targetRef") or {}
        ready = conditions.get("ready") is not False and not conditions.get("terminating")
        address = item["addresses"][0]
        yield PodSeen(
            target.get("name") or address,
            target.get("uid") or "",
            address,
            ready,
            born,
            {**labels, **_place(item.get("nodeName"), item.get("zone"))},
            ports=ports,
        )


def _place(node: str | None = None, zone: str | None = None, host: str | None = None) -> dict[str, str]:
    return {key: value for key, value in ((HOST_NAME, node), (ZONE, zone), (HOST_ADDRESS, host)) if value}


def _is_of_slices(label: str) -> bool:
    return label == SERVICE_LABEL or label.startswith("endpointslice.kubernetes.io/")


def _is_tcp(port: Mapping[str, Any]) -> bool:
    return (port.get("protocol") or "TCP") == "TCP"
