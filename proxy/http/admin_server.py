"""The admin port's listening socket."""

from __future__ import annotations

from aiohttp import web

from proxy.http.settings import Admin
from proxy.http.tls import server_context

SHUTDOWN_SECONDS = 1.0
"""What control calls that still run get when the process stops."""


class AdminServer:
    """`async with`: inside of it the port is open."""

    def __init__(self, settings: Admin, application: web.Application) -> None:
        self._settings = settings
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)

    async def __aenter__(self) -> AdminServer:
        """Raises OSError if the address is taken or is none, or the certificate cannot be used."""
        await self._runner.setup()
        try:
            tls = None if self._settings.tls is None else server_context(self._settings.tls)
            await web.TCPSite(self._runner, self._settings.host, self._settings.port, ssl_context=tls).start()
        except OSError:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def port(self) -> int:
        """The one that is open, also where the settings say 0."""
        port: int = self._runner.addresses[0][1]
        return port
