"""Endpoint data that several plugins read: custom attributes and topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import reads
from proxy.core.request import OUTPUT_ESTIMATE, DataKey


def attribute_reader(name: str, producer: str) -> Callable[[Endpoint], float | None]:
    """Return a function that returns the attribute of an endpoint; None if it is missing. Without a producer, the name
    may end in `/` and a producer."""
    qualified = f"{name}/{producer}" if producer else name
    alone = name if producer else name.rpartition("/")[0]

    def read(endpoint: Endpoint) -> float | None:
        attributes = endpoint.metrics.attributes
        value = attributes.get(qualified)
        return attributes.get(alone) if value is None else value

    return read


def reads_load() -> Any:
    """Declare the field of a plugin with the key of the estimates that the load in flight includes."""
    doc = "required inflight-load-producer"
    return reads(OUTPUT_ESTIMATE, "inFlightLoadProducerName", doc, if_named=True)


PEER: DataKey[Endpoint] = DataKey("PeerEndpoint", value_type=Endpoint)
"""The pod of an earlier stage of the request, for the profiles that run after that stage."""

HOST = "kubernetes.io/hostname"
LEVELS = ("host", "rack", "zone", "region")
LABELS = (HOST, "topology.kubernetes.io/rack", "topology.kubernetes.io/zone", "topology.kubernetes.io/region")
"""Labels of the levels, in order."""

APART = len(LEVELS)


def distances(peer: Endpoint, endpoints: Sequence[Endpoint]) -> list[int]:
    """Return the index of the nearest level that each shares with the peer, else APART. A missing label is not shared.
    Without a label, the host is that of the pod's URL."""
    location = _location(peer)
    return [_distance(location, _location(endpoint)) for endpoint in endpoints]


def _distance(location: Sequence[str], others: Sequence[str]) -> int:
    shared = (at for at, (one, other) in enumerate(zip(location, others, strict=True)) if one and one == other)
    return next(shared, APART)


def _location(endpoint: Endpoint) -> list[str]:
    host, *rest = [endpoint.labels.get(label, "") for label in LABELS]
    return [host or urlsplit(endpoint.url).hostname or "", *rest]
