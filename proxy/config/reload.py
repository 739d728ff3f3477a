"""Replacement of the configuration of a running proxy: all of the new one, or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from proxy.config.load import ANOTHER_FILE, ConfigReader, named_files
from proxy.config.warnings import warnings
from proxy.core.errors import ConfigError, Conflict, Problem
from proxy.core.params import FromEnvironment, camel, join, yaml_key
from proxy.core.ports import Clock
from proxy.settings import DERIVED, Settings
from proxy.telemetry.metrics import Catalogue

log = logging.getLogger(__name__)

T = TypeVar("T")

FIXED = (
    "listen",
    "admin.host",
    "admin.port",
    "admin.tls",
    "extproc",
    "replicas",
    "security.cors",
    "telemetry.logFormat",
    "telemetry.accessLog",
    "telemetry.record",
    "telemetry.tracing",
)
"""Paths of settings that need a restart of the process."""

OF_THE_HOST = ("listen.host", "listen.port", "admin.host", "admin.port", "admin.tls", "extproc", "replicas")
"""Paths of settings that need a restart of the supervisor too."""

OF_A_POOL = ("pods", "flow_control", "disaggregation")

_INDEX = re.compile(r"\[\d+\]")

OF_THE_FILE = "can be changed only in the file: the admin port accepts the actuator in effect"


class NotApplied(ConfigError):
    """The process could not change to a valid configuration, and serves with the one in effect."""

    def __init__(self, why: str) -> None:
        super().__init__([Problem("", f"{why}; the configuration in effect stays")])


class ReloadTarget(Protocol):
    """A process that serves with a configuration."""

    def check(self, wanted: Settings) -> Sequence[str]:
        """Return the paths that `reload` would leave for a restart. Raise ConfigError."""

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """Apply the settings. Return the paths that need a restart. Raise ConfigError, and change nothing."""


@dataclass(frozen=True)
class Version:
    """A configuration in effect. `since` is in seconds since the Unix epoch; the paths `left` need a restart."""

    number: int
    settings: Settings
    origin: str
    since: float
    left: Sequence[str] = ()

    @property
    def sha256(self) -> str:
        """The first 12 digits of the digest of the configuration."""
        return _digest(self.settings.source)

    @cached_property
    def of_deployment(self) -> str:
        """The same digest without the listen addresses and the name of the proxy, for other proxies to compare."""
        source = {key: value for key, value in self.settings.source.items() if key not in ("listen", "admin")}
        if isinstance(replicas := source.get("replicas"), Mapping):
            source["replicas"] = {key: value for key, value in replicas.items() if key != "name"}
        return _digest(source)


class Configurations:
    """The configurations of a proxy. Changes are applied one at a time."""

    def __init__(
        self, settings: Settings, target: ReloadTarget, reader: ConfigReader, clock: Clock, catalogue: Catalogue
    ) -> None:
        self._target = target
        self._reader = reader
        self._clock = clock
        self._catalogue = catalogue
        self._before: Version | None = None
        self._lock = asyncio.Lock()
        self._put_in_effect(Version(1, settings, "start", clock.wall()))

    async def read_again(self, origin: str) -> None:
        """Reload the file, and log the result."""
        try:
            await self._change(self._reader.again, origin)
        except NotApplied:
            return  # it is logged
        except ConfigError as error:
            file, faults = str(self._reader.file), "; ".join(map(str, error.problems))
            log.error("not reloaded: %s", faults if faults.startswith(file) else f"{file}: {faults}")
        except Exception:
            log.exception("not reloaded: an unexpected error; the configuration stays as it was")

    async def propose(self, text: str, dry_run: bool, expands: bool) -> dict[str, Any]:
        """Apply a configuration in YAML or JSON. Return what it changes. Unless it `expands` environment variables, it
        must contain none, and name no file that is not in effect. Raise ConfigError."""

        def read() -> Settings:
            wanted = self._reader.of(text, expands)
            if problems := list(self._refused(wanted, expands)):
                raise ConfigError(problems)
            return wanted

        return await self._change(read, "admin", dry_run)

    async def roll_back(self) -> dict[str, Any]:
        """Reload the previous configuration. Raise Conflict without one, ConfigError if it is not valid any more."""
        if (before := self._before) is None:
            raise Conflict("There is no previous configuration: this is the one of the start.")
        return await self._change(lambda: before.settings, "rollback")

    def described(self) -> dict[str, Any]:
        now, before = self._now, self._before
        return {
            "number": now.number,
            "sha256": now.sha256,
            "origin": now.origin,
            "since": now.since,
            "needsRestart": list(now.left),
            "rollsBackTo": None if before is None else before.number,
        }

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self._now.settings

    @property
    def of_deployment(self) -> str:
        return self._now.of_deployment

    def written(self) -> Any:
        """Return the plain values of the configuration, with variables expanded."""
        return json.loads(json.dumps(_as_written(self._now.settings.source), default=str))

    async def _change(self, read: Callable[[], Settings], origin: str, dry_run: bool = False) -> dict[str, Any]:
        async with self._lock:
            try:
                wanted, found_warnings = await asyncio.to_thread(lambda: (new := read(), list(warnings(new))))
                changes = changed(self._now.settings, wanted)
                left = self._target.check(wanted) if dry_run else await self._target.reload(wanted)
            except Exception as error:
                if not dry_run:
                    self._count("refused")
                if isinstance(error, NotApplied):
                    log.error("not reloaded: %s", error)
                raise
            if not dry_run:
                self._applied(wanted, origin, changes, left)
            found = {"changed": changes, "needsRestart": list(left), "warnings": found_warnings}
            return {**self.described(), "dryRun": dry_run, **found}

    def _refused(self, wanted: Settings, expands: bool) -> Iterator[Problem]:
        """Yield a problem for each new actuator, because they run programs and send tokens, and for each new file."""
        known = self._now.settings.autoscale.pools
        for name, pool in wanted.autoscale.pools.items():
            if pool.actuator is not None and (name not in known or known[name].actuator != pool.actuator):
                yield Problem(f"autoscale.pools.{name}.actuator", OF_THE_FILE)
        files = {(_INDEX.sub("", at), file) for at, file in named_files(self._now.settings.source)}
        for at, file in () if expands else named_files(wanted.source):
            if (_INDEX.sub("", at), file) not in files:
                yield Problem(at, ANOTHER_FILE)

    def _applied(self, wanted: Settings, origin: str, changes: Sequence[str], left: Sequence[str]) -> None:
        self._count("applied" if changes else "unchanged")
        if not changes:
            log.info("reloaded: the configuration is unchanged")
            return
        self._before = self._now
        self._put_in_effect(Version(self._now.number + 1, wanted, origin, self._clock.wall(), left))
        log.info("reloaded: version %d by %s changes %s", self._now.number, origin, ", ".join(changes))
        for remark in wanted.remarks:
            log.warning("%s", remark)
        if left:
            log.warning("not applied until the next start: %s", ", ".join(left))

    def _put_in_effect(self, version: Version) -> None:
        self._now = version
        catalogue = self._catalogue
        catalogue.config_version.cell().value = version.number
        catalogue.config_info.clear()
        catalogue.config_info.cell(version.sha256, version.origin).value = 1

    def _count(self, result: str) -> None:
        catalogue = self._catalogue
        catalogue.config_reloads.cell(result).add()
        catalogue.config_reloaded_at.cell().value = self._clock.wall()
        catalogue.config_reload_is_good.cell().value = float(result != "refused")


def _digest(source: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(source, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _as_written(value: Any) -> Any:
    """Return a value from the environment as a file would contain it: as a number or a boolean if possible."""
    if isinstance(value, Mapping):
        return {key: _as_written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    if isinstance(value, FromEnvironment):
        return json.loads(value) if _PLAIN.fullmatch(value) else value
    return value


_PLAIN = re.compile(r"true|false|-?(?:0|[1-9]\d{0,14})(?:\.\d{0,8}[1-9])?")
"""Numbers that convert back to the same text: without leading zeros."""


def changed(before: Settings, after: Settings) -> list[str]:
    """Return the paths of all values that differ."""
    sections = [item.name for item in dataclasses.fields(Settings) if item.name not in DERIVED]
    found = list(_of_sections(before, after, sections, before.source, after.source))
    for name in {**before.pools, **after.pools}:
        was, wanted, path = before.pools.get(name), after.pools.get(name), f"pools.{name}"
        if was is None or wanted is None:
            found.append(path)
        else:
            found.extend(_of_sections(was, wanted, OF_A_POOL, was.given, wanted.given, path))
    kept = [[name for name in one.pools if name in other.pools] for one, other in ((before, after), (after, before))]
    return [*found, *(["pools"] if kept[0] != kept[1] else [])]


def servable(before: Settings, wanted: Settings, fixed: Sequence[str] = FIXED) -> tuple[Settings, list[str]]:
    """Return the wanted settings as far as a running process can adopt them, and the paths of the rest."""
    left = [path for path in changed(before, wanted) if any(f"{path}.".startswith(f"{other}.") for other in fixed)]
    source = wanted.source
    for path in fixed:
        wanted = _with(wanted, before, path.split("."))
        source = _with_source(source, before.source, path.split("."))
    return dataclasses.replace(wanted, source=source), left


def _of_sections(
    before: object,
    after: object,
    sections: Sequence[str],
    given_before: Mapping[str, Any],
    given_after: Mapping[str, Any],
    path: str = "",
) -> Iterator[str]:
    """Yield the differences of plain sections, and of `scheduling` as it was given."""
    for section in sections:
        yield from _between(getattr(before, section), getattr(after, section), join(path, camel(section)))
    was, wanted = (given.get("scheduling") or {} for given in (given_before, given_after))
    yield from _between(was, wanted, join(path, "scheduling"))


def _between(before: Any, after: Any, path: str) -> Iterator[str]:
    if dataclasses.is_dataclass(before) and type(before) is type(after):
        for item in dataclasses.fields(before):
            yield from _between(getattr(before, item.name), getattr(after, item.name), join(path, yaml_key(item)))
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            yield from _between(before.get(key), after.get(key), join(path, str(key)))
    elif before != after:
        yield path


def _with(wanted: T, before: T, path: list[str]) -> T:
    """Return the settings with the value of `before` at this path."""
    name = next(item.name for item in dataclasses.fields(wanted) if yaml_key(item) == path[0])  # type: ignore[arg-type]
    own, other = getattr(wanted, name), getattr(before, name)
    return dataclasses.replace(wanted, **{name: other if len(path) == 1 else _with(own, other, path[1:])})  # type: ignore[type-var]


def _with_source(wanted: Mapping[str, Any], before: Mapping[str, Any], path: list[str]) -> Mapping[str, Any]:
    """Return the source with what `before` has at this path, or without it. Workers that start later read it."""
    name, *rest = path
    if rest:
        own, other = (given.get(name) or {} for given in (wanted, before))
        section = _with_source(own, other, rest)
        return {**wanted, name: section} if section or name in wanted else wanted
    if name in before:
        return {**wanted, name: before[name]}
    return {key: value for key, value in wanted.items() if key != name}
