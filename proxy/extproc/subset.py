"""Requests that a gateway lets go to some pods only: a gate before the decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints
from proxy.core.ports import Gate
from proxy.core.request import InferenceRequest
from proxy.extproc.addresses import Addresses

SUBSET = ":subset"
"""Header under which a call has what the gateway said. No client can send one of this name, by any version of HTTP."""

NAMESPACE = "envoy.lb.subset_hint"
KEY = "x-gateway-destination-endpoint-subset"


def told_subset(metadata: Mapping[str, Any]) -> str | None:
    """Of the metadata of a request: addresses, separated by commas; None where all pods are meant."""
    told = metadata.get(NAMESPACE, {}).get(KEY)
    return None if told is None else told if isinstance(told, str) else ",".join(map(str, told))


class SubsetGate(Gate):
    """Lets a request go only to the pods that its gateway named."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Raises NoEndpoints if none of them is meant."""
        told = request.headers.get(SUBSET)
        if told is None:
            return endpoints
        meant = {address.strip() for address in told.split(",")}
        left = [endpoint for endpoint in endpoints if meant & self._addresses.known(endpoint)]
        if not left:
            raise NoEndpoints("None of the pods that the gateway allows for this request is ready; try again shortly.")
        return left
