"""The addresses of pods, as gateways know them, and the pods that a gateway allows for a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints
from proxy.core.ports import Admission, Clock
from proxy.core.request import InferenceRequest
from proxy.http.upstream.pool import PodAddress, Resolve, is_address, not_connected, resolve_host

KEPT = 30.0
"""Seconds for which a resolved name is cached."""

REMEMBERED = 16_384


class Addresses:
    """The resolved addresses of pods. Lives as long as the proxy."""

    def __init__(self, clock: Clock, resolve: Resolve = resolve_host) -> None:
        self._clock = clock
        self._resolve = resolve
        self._found: dict[str, tuple[float, str]] = {}
        """Expiry and address by URL."""

    async def of(self, endpoint: Endpoint) -> str:
        """Return the address of a pod. Raise ConnectFailed if its name cannot be resolved."""
        found = self._found.get(endpoint.url)
        if found is not None and found[0] > self._clock.now():
            return found[1]
        try:
            there = PodAddress.of(endpoint.url)
            host = there.host if is_address(there.host) else await self._first(there)
        except (OSError, ValueError) as error:
            raise not_connected(error) from error
        address = _written(host, there.port)
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        self._found[endpoint.url] = (self._clock.now() + KEPT, address)
        return address

    def known(self, endpoint: Endpoint) -> Set[str]:
        """Return the addresses of a pod without resolving its name: host and port of its URL, and the last resolved
        address."""
        found = self._found.get(endpoint.url)
        return {_named(endpoint.url), *(() if found is None else found[1:])}

    def at(self, address: str, endpoints: Iterable[Endpoint]) -> Endpoint | None:
        return next((endpoint for endpoint in endpoints if address in self.known(endpoint)), None)

    async def _first(self, there: PodAddress) -> str:
        return str((await self._resolve(there.host, there.port))[0][4][0])


@lru_cache(maxsize=16_384)
def _named(url: str) -> str:
    there = PodAddress.of(url)
    return _written(there.host, there.port)


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


SUBSET = ":subset"
"""Header of a request with the allowed addresses. Clients cannot send a header of this name."""

SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET_KEY = "x-gateway-destination-endpoint-subset"


def subset_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the allowed addresses, separated by commas, from the metadata of a request; None: all pods."""
    subset = metadata.get(SUBSET_NAMESPACE, {}).get(SUBSET_KEY)
    return None if subset is None else subset if isinstance(subset, str) else ",".join(map(str, subset))


class SubsetAdmission(Admission):
    """Keeps the pods that Envoy allows for the request."""

    holds_for_retries: ClassVar[bool] = True

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Return the allowed endpoints. Raise NoEndpoints without one."""
        subset = request.headers.get(SUBSET)
        if subset is None:
            return endpoints
        meant = {address.strip() for address in subset.split(",")}
        left = [endpoint for endpoint in endpoints if meant & self._addresses.known(endpoint)]
        if not left:
            raise NoEndpoints("None of the pods that Envoy allows can serve this request; try again shortly.")
        return left
