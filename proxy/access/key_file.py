"""Further keys, in a file that is read again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from proxy import yaml_source
from proxy.access.settings import ApiKey
from proxy.core import params
from proxy.core.errors import ConfigError, Problem

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the file."""

ApiKeys = tuple[ApiKey, ...]
Take = Callable[[ApiKeys], None]


class KeyFile:
    """A file that is missing or broken takes no keys away while kvlane runs; its faults are logged once."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path = Path(path)
        self._environ = environ
        self._seen: tuple[int, ...] = ()

    def read(self) -> ApiKeys:
        """Raises ConfigError."""
        try:
            stat = self._path.stat()
            self._seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            self._seen = ()
            raise ConfigError([Problem(str(self._path), f"cannot be read: {error.strerror}")]) from None
        except UnicodeDecodeError:
            raise ConfigError([Problem(str(self._path), "is not UTF-8")]) from None
        return self._parsed(text)

    async def watch(self, take: Take) -> None:
        """Until it is cancelled; `take` gets all keys of the file and may raise ConfigError for them."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                if self._seen == await asyncio.to_thread(self._stamp):
                    continue
                keys = await asyncio.to_thread(self.read)
                take(keys)
                log.info("%s has changed: %d keys", self._path, len(keys))
            except ConfigError as error:
                log.error("the keys stay as they were: %s", error)

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return (stat.st_mtime_ns, stat.st_ino, stat.st_size)

    def _parsed(self, text: str) -> ApiKeys:
        entries = yaml_source.read(text, str(self._path), self._environ)
        try:
            keys: Any = params.coerce(tuple[ApiKey, ...], entries or [], str(self._path))
        except params.Invalid as invalid:
            raise ConfigError(invalid.problems) from None
        read: ApiKeys = keys
        return read
