"""The configurations that kvlane serves with, one after the other: all of a new one, or nothing of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from proxy.config.diff import changed
from proxy.config.load import ANOTHER_FILE, Reader
from proxy.config.warnings import cautions
from proxy.core.errors import ConfigError, Conflict, Problem
from proxy.core.params import FromEnvironment, join
from proxy.core.ports import Clock
from proxy.settings import Settings
from proxy.telemetry.metrics import Catalogue

log = logging.getLogger(__name__)

OF_THE_FILE = "is for the file alone: the admin port takes none but the one in effect"


class Served(Protocol):
    """Who serves with them."""

    def check(self, wanted: Settings) -> Sequence[str]:
        """The paths of what would not change until a restart. Raises ConfigError."""

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """The same, once everything else has changed. Raises ConfigError, and nothing has changed then."""


@dataclass(frozen=True)
class Version:
    """`since` is in seconds since the Unix epoch; `left` are the paths of what waits for a restart."""

    number: int
    settings: Settings
    origin: str
    since: float
    left: Sequence[str] = ()

    @property
    def sha256(self) -> str:
        """The beginning of the digest of what was written."""
        return _digest(self.settings.source)

    @cached_property
    def of_deployment(self) -> str:
        """The same, less what each of its proxies has for itself: where it listens, and its name."""
        source = {key: value for key, value in self.settings.source.items() if key not in ("listen", "admin")}
        if isinstance(replicas := source.get("replicas"), Mapping):
            source["replicas"] = {key: value for key, value in replicas.items() if key != "name"}
        return _digest(source)


class Configurations:
    """One change after the other, however many ask for one."""

    def __init__(self, settings: Settings, served: Served, reader: Reader, clock: Clock, catalogue: Catalogue) -> None:
        self._served = served
        self._reader = reader
        self._clock = clock
        self._catalogue = catalogue
        self._before: Version | None = None
        self._lock = asyncio.Lock()
        self._begin(Version(1, settings, "start", clock.wall()))

    async def read_again(self, origin: str) -> None:
        """The file; what came of it is in the log."""
        try:
            await self._change(self._reader.again, origin)
        except ConfigError as error:
            log.error("not reloaded: %s", "; ".join(map(str, error.problems)))
        except Exception:
            log.exception("not reloaded: an unexpected error; the configuration stays as it was")

    async def propose(self, text: str, dry_run: bool, expands: bool) -> dict[str, Any]:
        """A configuration in YAML or JSON; says what it changes. Unless it `expands` variables of the environment, it
        must have none, and name no file that is not in effect. Raises ConfigError."""

        def read() -> Settings:
            wanted = self._with_known_actuators(self._reader.of(text, expands))
            return wanted if expands else self._with_known_files(wanted)

        return await self._change(read, "admin", dry_run)

    async def roll_back(self) -> dict[str, Any]:
        """To the one before, which then is the one to go back to. Raises Conflict if there is none, ConfigError if it
        cannot be had any more."""
        before = self._before
        if before is None:
            raise Conflict("There is no configuration to go back to: this is the one of the start.")
        return await self._change(lambda: before.settings, "rollback")

    def described(self) -> dict[str, Any]:
        """Which one is in effect."""
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
    def of_deployment(self) -> str:
        """Which one is in effect, for other proxies to compare with theirs."""
        return self._now.of_deployment

    def written(self) -> Any:
        """The plain values that it was made of, variables filled in."""
        return json.loads(json.dumps(_as_written(self._now.settings.source), default=str))

    async def _change(self, read: Callable[[], Settings], origin: str, dry_run: bool = False) -> dict[str, Any]:
        async with self._lock:
            try:
                wanted, warnings = await asyncio.to_thread(_with_cautions, read)
                differences = changed(self._now.settings, wanted)
                left = self._served.check(wanted) if dry_run else await self._served.reload(wanted)
            except Exception:
                if not dry_run:
                    self._count("refused")
                raise
            if not dry_run:
                self._follow(wanted, origin, differences, left)
            found = {"changed": differences, "needsRestart": list(left), "warnings": warnings}
            return {**self.described(), "dryRun": dry_run, **found}

    def _with_known_actuators(self, wanted: Settings) -> Settings:
        """They run programs and send tokens, so they are for who may write the file. Raises ConfigError."""
        known = self._now.settings.autoscale.pools
        problems = [
            Problem(f"autoscale.pools.{name}.actuator", OF_THE_FILE)
            for name, pool in wanted.autoscale.pools.items()
            if pool.actuator is not None and (name not in known or known[name].actuator != pool.actuator)
        ]
        if problems:
            raise ConfigError(problems)
        return wanted

    def _with_known_files(self, wanted: Settings) -> Settings:
        """Raises ConfigError."""
        known = dict(_files(self._now.settings.source))
        problems = [Problem(at, ANOTHER_FILE) for at, file in _files(wanted.source) if known.get(at) != file]
        if problems:
            raise ConfigError(problems)
        return wanted

    def _follow(self, wanted: Settings, origin: str, differences: Sequence[str], left: Sequence[str]) -> None:
        self._count("applied" if differences else "unchanged")
        if not differences:
            log.info("reloaded: nothing has changed")
            return
        self._before = self._now
        self._begin(Version(self._now.number + 1, wanted, origin, self._clock.wall(), left))
        log.info("reloaded: version %d by %s changes %s", self._now.number, origin, ", ".join(differences))
        for remark in wanted.remarks:
            log.warning("%s", remark)
        if left:
            log.warning("what changes with the next start only: %s", ", ".join(left))

    def _begin(self, version: Version) -> None:
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


def _files(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each setting that names a file."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _files(item, join(path, str(key)))
    elif isinstance(value, str) and _FILE.search(path) and not value.startswith(("http://", "https://")):
        yield path, value


_FILE = re.compile(
    r"(?:^|\.)(?:apiKeysFile|tokenFile|caFile|jwks|(?:pods|record)\.file|tls\.(?:ca|cert|key|clientCa))$"
)


def _with_cautions(read: Callable[[], Settings]) -> tuple[Settings, list[str]]:
    settings = read()
    return settings, list(cautions(settings))


def _as_written(value: Any) -> Any:
    """What came from the environment, as a file would have it: a number or a boolean where it is the text of one."""
    if isinstance(value, Mapping):
        return {key: _as_written(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item) for item in value]
    if isinstance(value, FromEnvironment):
        return json.loads(value) if _PLAIN.fullmatch(value) else value
    return value


_PLAIN = re.compile(r"true|false|-?(?:0|[1-9]\d{0,14})(?:\.\d{0,8}[1-9])?")
"""What is the same text again, should text be wanted: without leading zeros."""
