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
from proxy.core.watched_files import WatchedFiles

log = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks at the file."""

ApiKeys = tuple[ApiKey, ...]
Take = Callable[[ApiKeys], None]


class KeyFile:
    """A file that is missing, empty or broken takes no keys away while kvlane runs; its faults are logged once."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self._path = Path(path)
        self._environ = environ
        self._file = WatchedFiles([path])

    def read(self) -> ApiKeys:
        """Raises ConfigError."""
        return self._file.read(self._load)

    async def watch(self, take: Take) -> None:
        """Until it is cancelled; `take` gets all keys of the file and may raise ConfigError for them."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                keys = await asyncio.to_thread(self._file.read_if_changed, self._load)
                if keys is not None:
                    take(keys)
                    log.info("%s has changed: %d keys", self._path, len(keys))
            except ConfigError as error:
                log.error("the keys stay as they were: %s", error)

    def _load(self) -> ApiKeys:
        entries = yaml_source.read(yaml_source.text_of(self._path), str(self._path), self._environ)
        if entries is None:
            raise ConfigError([Problem(str(self._path), "is empty; write [] for no keys")])
        try:
            keys: Any = params.coerce(tuple[ApiKey, ...], entries, str(self._path))
        except params.Invalid as invalid:
            raise ConfigError(invalid.problems) from None
        read: ApiKeys = keys
        return read
