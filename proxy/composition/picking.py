"""The port for gateways, where one is wanted: beside the data port, and before the same `proxy.gateway`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from proxy.core.errors import ConfigError, Problem
from proxy.core.ports import Clock
from proxy.extproc.addresses import Addresses
from proxy.extproc.settings import ExtProcSettings
from proxy.http.server import DataServer
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.extproc.server import Picker


def check(settings: ExtProcSettings) -> None:
    """Raises ConfigError if the extra is wanted and missing."""
    try:
        if settings.is_on:
            importlib.import_module("proxy.extproc.server")
    except ImportError:
        raise ConfigError([Problem("extproc.port", "needs the extra: pip install 'kvlane[extproc]'")]) from None


def picker_of(settings: Settings, server: DataServer, addresses: Addresses, clock: Clock) -> Picker | None:
    """None where no port is configured. What both ports have in common is the server's: the budget of bodies, who is
    told of first bytes and ends, the connections to pods."""
    if not settings.extproc.is_on:
        return None
    from proxy.extproc.bodies import StreamedBodies
    from proxy.extproc.server import Picker

    bodies = StreamedBodies(settings.listen, server.budget)
    return Picker(settings.extproc, lambda: server.service_of(bodies), addresses, lambda: server.rim, clock)
