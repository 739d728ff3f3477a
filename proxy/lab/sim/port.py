"""Where a pod listens, and keeps its place while it does not: a port that is free may be another program's soon."""

from __future__ import annotations

import socket
from typing import Any

from aiohttp import web

BACKLOG = 1024


class Port:
    """Lives as long as its pod does. Who connects while nobody listens is refused, also while the place is kept."""

    def __init__(self) -> None:
        self._place: tuple[str, int] = "", 0
        self._kept: list[socket.socket] = []

    async def listen(self, runner: web.AppRunner, host: str, port: int) -> int:
        """Which it is: port 0 takes any free one. Raises OSError if somebody else has it."""
        if (host, port) != self._place:
            self.give_up()
        kept, self._kept = self._kept, []
        for sock in kept:
            await web.SockSite(runner, sock, backlog=BACKLOG).start()
        if not kept:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        self._place = host, int(runner.addresses[0][1])
        return self._place[1]

    async def close(self, runner: web.AppRunner) -> None:
        addresses = runner.addresses
        for site in list(runner.sites):
            await site.stop()
        for address in addresses:
            self._keep(address)
        if len(self._kept) < len(addresses):
            self.give_up()

    def give_up(self) -> None:
        while self._kept:
            self._kept.pop().close()

    def _keep(self, address: tuple[Any, ...]) -> None:
        """Not where the loop closes its sockets later, as uvloop does."""
        is_v6 = len(address) == 4
        sock = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_v6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
        else:
            self._kept.append(sock)
