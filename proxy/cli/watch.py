"""Tells when a configuration file has changed."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from proxy import yaml_source
from proxy.core.errors import ConfigError

INTERVAL = 1.0
"""Seconds between two looks. A change counts when two of them have seen the same, so that nothing is read that somebody
is still writing."""


async def watch(
    file: Path, known: bytes | None, changed: Callable[[], Awaitable[None]], interval: float = INTERVAL
) -> None:
    """Until it is cancelled; `known` is the digest of what was read. Looks at what is in the file, by whatever links
    that is reached: those who mount a ConfigMap turn a link to another folder."""
    seen = known
    while True:
        await asyncio.sleep(interval)
        before, seen = seen, await asyncio.to_thread(digest, file)
        if seen is not None and seen == before and seen != known:
            known = seen
            await changed()


def digest(file: Path) -> bytes | None:
    """Of the file and of those that its `scheduling.file` and those of its pools name; None while they cannot be
    read."""
    try:
        text = file.read_bytes()
        return hashlib.sha256(b"".join([text, *((file.parent / name).read_bytes() for name in _files(text))])).digest()
    except (OSError, ValueError):  # ValueError: a path with a NUL
        return None


def _files(text: bytes) -> list[str]:
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
