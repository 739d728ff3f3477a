"""Warnings about configurations that are valid, but probably not intended."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from proxy.autoscale import settings as autoscale
from proxy.config.load import named_files, texts
from proxy.core.endpoint import DEFAULT_POOL, ROLE_LABEL, PodTls
from proxy.core.errors import Problem, cause
from proxy.core.params import FromEnvironment, load, plain, suggestion
from proxy.core.registry import Registry
from proxy.disagg import settings as disagg
from proxy.flowcontrol import settings as flowcontrol
from proxy.http.settings import ServerTls, tls_fault
from proxy.http.upstream.pool import is_address
from proxy.reliability import settings as reliability
from proxy.scheduling import layout as scheduling
from proxy.settings import Settings

STARTS_NOT = "kvlane does not start without it"

NO_PODS = "no pods are configured: add them under pods, or through the admin port; until then every request gets a 503"

_UNBRACED = re.compile(r"\$[A-Z][A-Z0-9_]+\b")


def warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings. Reads the file system, so do not call it on the event loop."""
    yield from _of_addresses(settings)
    yield from _of_files(settings)
    for path, text in texts(settings.source):
        if _UNBRACED.match(text) and not isinstance(text, FromEnvironment):
            yield f"{path}: is not expanded: an environment variable is written with braces, ${{NAME}}."
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
    yield from _of_roles(settings)
    yield from _of_fallbacks(settings)
    if settings.autoscale.pools:
        yield from map(str, autoscale.warnings(settings.autoscale))
    if not settings.has_pods:
        yield NO_PODS


def _of_addresses(settings: Settings) -> Iterator[str]:
    host = settings.admin.host
    is_loopback = host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)
    if not settings.admin.api_key and not is_loopback:
        yield f"admin.host: anyone who can reach {host} can change everything; set admin.apiKey."
    if settings.listen.max_body < 1024:
        yield (
            f"listen.maxBody: {settings.listen.max_body} bytes are too few for most requests; "
            "a number without a unit is in bytes."
        )


def _of_roles(settings: Settings) -> Iterator[str]:
    roles = [(path, str(pod.get("role") or "")) for path, pod in _static_pods(settings)]
    for name, pool in settings.all_pools.items():
        path = "pods" if name == DEFAULT_POOL else f"pools.{name}.pods"
        sources = {"dns": pool.pods.dns, "kubernetes": pool.pods.kubernetes}
        roles += [(f"{path}.{key}", source.role) for key, source in sources.items() if source is not None]
    scaled = (role.name for pool in settings.autoscale.pools.values() for role in pool.roles)
    known = tuple(dict.fromkeys((*disagg.ROLES, *scaled)))
    for path, role in roles:
        if role and role not in known:
            yield f"{path}.role: {role!r} is not one of {', '.join(known)}{suggestion(role, known)}"


def _of_fallbacks(settings: Settings) -> Iterator[str]:
    """Yield a warning for each fallback that seems to name a pool but does not."""
    pools = list(settings.all_pools)
    for model, others in settings.models.fallbacks.items():
        for index, name in enumerate(others):
            first, _, pool = name.rpartition("@")
            if first and pool not in pools:
                path = f"models.fallbacks.{model}[{index}]"
                yield f"{path}: there is no pool {pool!r}, so {name!r} is the name of a model{suggestion(pool, pools)}"


def _of_files(settings: Settings) -> Iterator[str]:
    """Yield a warning for every file that is missing, or that this user cannot read."""
    named = dict(named_files(settings.source))
    for pool, own in settings.all_pools.items():
        if own.pods.file is not None:  # which file-discovery may name
            named.setdefault("pods.file" if pool == DEFAULT_POOL else f"pools.{pool}.pods.file", own.pods.file)
    for path, name in named.items():
        file, kind = (Path(name).parent, "the folder ") if path.endswith("record.file") else (Path(name), "")
        if what := _fault_of(file, is_folder=bool(kind)):
            yield f"{path}: {kind}{file} {what}; {_without(path)}."


def _fault_of(file: Path, is_folder: bool) -> str:
    """Return why this user cannot use the file; "" if it is usable."""
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read: {cause(error)}"
    if stat.S_ISDIR(mode) != is_folder:
        return "is a file, not a folder" if is_folder else "is a folder, not a file"
    return "" if os.access(file, os.R_OK) else "cannot be read by this user"


def _without(path: str) -> str:
    """Return what happens without the file of this setting."""
    if path.startswith(("listen.", "admin.", "extproc.", "security.apiKeysFile")):
        return STARTS_NOT
    if path.endswith("pods.file"):
        return "it provides no pods until it does"
    return "nothing is recorded" if path.endswith("record.file") else "connections that need it fail"


def unusable(settings: Settings) -> Iterator[Problem]:
    """Yield a fault for each `tls` whose files exist and cannot be used. A missing file is a warning, because a machine
    that checks a configuration may not have it."""
    for path, tls in _tls_sections(settings):
        if tls is not None and (fault := tls_fault(tls, path)) is not None:
            files = (name for at, name in named_files(plain(tls), "tls"))
            if all(os.access(name, os.R_OK) for name in files):
                yield fault


def _tls_sections(settings: Settings) -> Iterator[tuple[str, ServerTls | PodTls | None]]:
    yield "listen.tls", settings.listen.tls
    yield "admin.tls", settings.admin.tls
    yield "extproc.tls", settings.extproc.tls
    for name, pool in settings.all_pools.items():
        yield "pods.tls" if name == DEFAULT_POOL else f"pools.{name}.pods.tls", pool.pods.tls
    for path, pod in _static_pods(settings):
        if "tls" in pod:
            yield f"{path}.tls", load(PodTls, pod["tls"])


def _static_pods(settings: Settings) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path and the values of each static pod as it was written."""
    for name, pool in settings.all_pools.items():
        given, path = (settings.source, "pods") if name == DEFAULT_POOL else (pool.given, f"pools.{name}.pods")
        for index, pod in enumerate((given.get("pods") or {}).get("static") or ()):
            yield f"{path}.static[{index}]", pod
