"""A pod for every address of a name."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from proxy.fleet.discovery import Source
from proxy.fleet.settings import DnsSettings, PodSettings, found_pod

log = logging.getLogger(__name__)

Lookup = Callable[[str], Awaitable[Sequence[str]]]
"""Name -> IP addresses. Raises OSError if it fails."""


async def system_lookup(name: str) -> Sequence[str]:
    """A records, and AAAA records where it has none of these: pods of a dual-stack service have one of each, and are
    not two pods for that."""
    infos = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    families = {family for family, *_ in infos}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(address[0]) for found, _, _, _, address in infos if found == family})


class DnsSource(Source):
    name = "dns"

    def __init__(self, settings: DnsSettings, lookup: Lookup = system_lookup) -> None:
        self._settings = settings
        self._lookup = lookup
        self._addresses: frozenset[str] = frozenset()
        self._failing = False

    @property
    def interval(self) -> float:
        return self._settings.interval

    async def poll(self) -> Sequence[PodSettings] | None:
        """A lookup that fails, or finds no address, takes no pods away."""
        try:
            addresses = await self._lookup(self._settings.name)
        except (OSError, UnicodeError) as error:
            addresses, why = (), str(error)
        else:
            why = "no addresses"
        if not addresses:
            self._warn_once(why)
            return None
        self._failing = False
        if frozenset(addresses) == self._addresses:
            return None
        self._addresses = frozenset(addresses)
        return [found_pod(self._settings, address, self._settings.port) for address in addresses]

    def _warn_once(self, why: str) -> None:
        if not self._failing:
            log.warning("failed to look up %s; keeping its pods: %s", self._settings.name, why)
        self._failing = True
