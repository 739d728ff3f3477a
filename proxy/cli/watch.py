"""The files of a configuration, followed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxy import yaml_source
from proxy.core.errors import ConfigError, Problem, Unreadable
from proxy.core.watched_files import WatchedFiles

INTERVAL = 1.0
"""Seconds between two looks."""


class ConfigurationFiles:
    """A configuration file, and the files that its `scheduling.file` and those of its pools name."""

    def __init__(self, file: Path) -> None:
        """Read the files, so that only later changes count."""
        self.file = file
        self._files = WatchedFiles([file])
        self._known: bytes | None = None
        with suppress(Unreadable):
            self._known = self._files.read(self._digest)

    async def follow(self, changed: Callable[[], Awaitable[None]], interval: float = INTERVAL) -> None:
        """Call `changed` whenever the content has changed, until cancelled."""
        while True:
            await asyncio.sleep(interval)
            with suppress(Unreadable):
                found = await asyncio.to_thread(self._files.read_if_changed, self._digest)
                if found not in (None, self._known):
                    self._known = found
                    await changed()

    def _digest(self) -> bytes:
        """Return the digest of the contents, by whatever links they are reached: an update of a ConfigMap changes a
        link to another folder. Raise Unreadable."""
        try:
            text = self.file.read_bytes()
            named = [self.file.parent / name for name in _named_files(text)]
            self._files.paths = [self.file, *named]
            return hashlib.sha256(b"".join([text, *(path.read_bytes() for path in named)])).digest()
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise Unreadable([Problem(str(self.file), str(error))]) from None


def _named_files(text: bytes) -> list[str]:
    if b"file" not in text:
        return []
    try:
        values = yaml_source.read_data(text.decode())
    except (ConfigError, UnicodeDecodeError):
        return []
    pools = _part(values, "pools")
    places = [values, *(pools.values() if isinstance(pools, dict) else ())]
    return [str(name) for place in places if (name := _part(_part(place, "scheduling"), "file"))]


def _part(values: Any, key: str) -> Any:
    return values.get(key) if isinstance(values, dict) else None
