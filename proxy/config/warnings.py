"""Warnings about configurations that are valid, but probably not intended."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from proxy.autoscale import settings as autoscale
from proxy.core.endpoint import DEFAULT_POOL, ROLE_LABEL
from proxy.core.registry import Registry
from proxy.disagg import settings as disagg
from proxy.flowcontrol import settings as flowcontrol
from proxy.http.upstream.pool import is_address
from proxy.reliability import settings as reliability
from proxy.scheduling import layout as scheduling
from proxy.settings import Settings

NO_PODS = "no pods are configured: add them under pods, or through the admin port; until then every request gets a 503"


def warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings. Reads the file system, so do not call it on the event loop."""
    yield from _of_addresses(settings)
    yield from _of_files(settings)
    yield from map(str, settings.remarks)
    pools = settings.all_pools
    yield from reliability.warnings(settings.reliability, [pool.pods.most for pool in pools.values()])
    registry = Registry.discover()
    for name, pool in pools.items():
        yield from scheduling.warnings(pool.scheduling, registry)
        section = "flowControl" if name == DEFAULT_POOL else f"pools.{name}.flowControl"
        yield from flowcontrol.warnings(pool.flow_control, section, settings.reliability.timeouts.request)
        types = {entry.type for entry in pool.scheduling.plugins}
        roles = {pod.role or pod.labels.get(ROLE_LABEL, "") for pod in pool.pods.static} if pool.pods.most else None
        yield from disagg.warnings(pool.disaggregation.connector, name, types, roles)
    if settings.autoscale.pools:
        yield from map(str, autoscale.warnings(settings.autoscale))
    if not settings.has_pods:
        yield NO_PODS


def _of_addresses(settings: Settings) -> Iterator[str]:
    if not settings.admin.api_key and not _is_loopback(settings.admin.host):
        yield f"admin.host: anyone who can reach {settings.admin.host} can change everything; set admin.apiKey."
    if settings.listen.max_body < 1024:
        yield (
            f"listen.maxBody: {settings.listen.max_body} bytes are too few for most requests; "
            "a number without a unit is in bytes."
        )
    for name, pool in settings.all_pools.items():
        if pool.pods.file is not None and not Path(pool.pods.file).exists():
            path = "" if name == DEFAULT_POOL else f"pools.{name}."
            yield f"{path}pods.file: {pool.pods.file} does not exist; it provides no pods until it does."


def _of_files(settings: Settings) -> Iterator[str]:
    """Yield a warning for every missing file that the start needs."""
    for section, tls in (("listen", settings.listen.tls), ("admin", settings.admin.tls)):
        named = () if tls is None else (("cert", tls.cert), ("key", tls.key), ("clientCa", tls.client_ca))
        for name, file in named:
            if file is not None and not Path(file).exists():
                yield f"{section}.tls.{name}: {file} does not exist; kvlane does not start without it."


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
