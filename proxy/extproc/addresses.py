"""Pods as gateways name them: addresses IP:PORT, and the subset of pods that a gateway allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

from proxy.core.endpoint import Endpoint
from proxy.core.errors import NoEndpoints
from proxy.core.ports import Clock, Gate
from proxy.core.request import InferenceRequest
from proxy.http.upstream.pool import Address, Resolve, is_address, look_up, not_connected

KEPT = 30.0
"""Seconds that a name is not looked up again."""

REMEMBERED = 16_384


class Addresses:
    """Lives as long as the proxy."""

    def __init__(self, clock: Clock, resolve: Resolve = look_up) -> None:
        self._clock = clock
        self._resolve = resolve
        self._found: dict[str, tuple[float, str]] = {}
        """By URL: until when, and the address."""

    async def of(self, endpoint: Endpoint) -> str:
        """Raises ConnectFailed if it cannot be found."""
        found = self._found.get(endpoint.url)
        if found is not None and found[0] > self._clock.now():
            return found[1]
        try:
            there = Address.of(endpoint.url)
            host = there.host if is_address(there.host) else await self._first(there)
        except (OSError, ValueError) as error:
            raise not_connected(error, self._clock.now()) from error
        address = _written(host, there.port)
        if len(self._found) >= REMEMBERED:
            self._found.clear()
        self._found[endpoint.url] = (self._clock.now() + KEPT, address)
        return address

    def known(self, endpoint: Endpoint) -> Set[str]:
        """Without looking it up: host and port of its URL, and what was found last."""
        found = self._found.get(endpoint.url)
        return {_named(endpoint.url), *(() if found is None else found[1:])}

    def at(self, address: str, endpoints: Iterable[Endpoint]) -> Endpoint | None:
        """The one of them that is there."""
        return next((endpoint for endpoint in endpoints if address in self.known(endpoint)), None)

    async def _first(self, there: Address) -> str:
        return str((await self._resolve(there.host, there.port))[0][4][0])


@lru_cache(maxsize=16_384)
def _named(url: str) -> str:
    there = Address.of(url)
    return _written(there.host, there.port)


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
