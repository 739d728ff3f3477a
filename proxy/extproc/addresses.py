"""Where pods are, as gateways name them: IP:PORT, which a pod whose URL has a name is looked up for."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import lru_cache

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
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
