"""The bytes of a KV event: ZeroMQ frames around msgpack, as vLLM and SGLang publish them.

A message is [topic, sequence number (8 bytes, big-endian), batch], a batch [time, [event, ...], data-parallel rank].
Events are arrays that begin with their type, or maps that have it as `type`; fields may be left out at the end, and
further ones follow in later versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from proxy.core.ports import AllCleared, BlocksRemoved, BlocksStored, KvEvent
from proxy.prefix.hashing import packed

SEQUENCE = 8
END = (1 << 64) - 1
"""The sequence number, -1, that ends a replay."""

DEFAULT_MEDIUM = "gpu"

MOST_RANKS = 1024
"""Largest number of data-parallel ranks of a pod; each has a cache of its own in the index."""

LONGEST_HASH = 64
"""Largest block hash in bytes, as of SHA-512."""

LONGEST_NAME = 1024
"""Largest number of characters in the name of a medium or an adapter."""

STEP = 200
"""Number of events per step of the event loop: 3 ms if each has one block."""

_STORED = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind"),
)
_REMOVED = ("block_hashes", "medium", "group_idx")

_WHOLE = ("full_attention", "mla_attention", "sink_full_attention", "unknown")
"""Kinds of layers that need every block of a prompt. Of others, such as sliding windows, only some blocks are
published."""


_NAMES = frozenset((int, bytes))


class InvalidEvent(Exception):
    """Bytes that are no message."""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """`at` is the engine's wall clock in seconds, `rank` is 0 without several ranks. `steps` parses the events."""

    at: float
    items: Sequence[Any]
    rank: int = 0

    def steps(self) -> Iterator[tuple[Sequence[KvEvent], int]]:
        """Yield at most STEP events at a time with the number of events that were not understood."""
        for start in range(0, len(self.items), STEP):
            yield _events(self.items[start : start + STEP])


def message(frames: Sequence[bytes]) -> tuple[str, int, bytes]:
    """Return topic, sequence number and batch. Raise InvalidEvent."""
    if len(frames) != 3 or len(frames[1]) != SEQUENCE:
        raise InvalidEvent(f"{len(frames)} frames")
    return frames[0].decode("utf-8", "replace"), int.from_bytes(frames[1], "big"), frames[2]


def replayed(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sequence number and batch of a replayed message; older engines leave out the topic. Raise InvalidEvent."""
    if len(frames) not in (3, 4) or len(frames[-2]) != SEQUENCE:
        raise InvalidEvent(f"{len(frames)} frames")
    return int.from_bytes(frames[-2], "big"), frames[-1]


def batch(payload: bytes) -> EventBatch:
    """Raise InvalidEvent for an invalid batch."""
    try:
        unpacked = msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise InvalidEvent(repr(error)) from None
    if not isinstance(unpacked, list) or len(unpacked) < 2 or not isinstance(unpacked[1], list):
        raise InvalidEvent("no batch")
    at, items, *rest = unpacked
    rank = rest[0] if rest and isinstance(rest[0], int) else 0
    if not 0 <= rank < MOST_RANKS:
        raise InvalidEvent(f"rank {rank} is not below {MOST_RANKS}")
    if isinstance(at, bool) or not isinstance(at, int | float):
        raise InvalidEvent("no time")
    return EventBatch(float(at), items, rank)


def _events(items: Sequence[Any]) -> tuple[Sequence[KvEvent], int]:
    """Skip and count invalid events."""
    events: list[KvEvent] = []
    odd = 0
    for item in items:
        try:
            if (event := _event(item)) is not None:
                events.append(event)
        except (TypeError, ValueError, OverflowError, AttributeError, IndexError, KeyError):
            odd += 1
    return events, odd


def _event(item: Any) -> KvEvent | None:
    """Return None for a valid event without effect."""
    kind = item["type"] if isinstance(item, dict) else item[0]
    if kind == "BlockStored":
        return _stored(_fields(item, _STORED))
    if kind == "BlockRemoved":
        fields = _fields(item, _REMOVED)
        return BlocksRemoved(_hashes(fields["block_hashes"]), _medium(fields), _group(fields))
    if kind == "AllBlocksCleared":
        return AllCleared()
    raise ValueError(kind)


def _fields(item: Any, names: Sequence[str]) -> dict[str, Any]:
    return item if isinstance(item, dict) else dict(zip(names, item[1:], strict=False))


def _stored(fields: dict[str, Any]) -> BlocksStored | None:
    kind = fields.get("kv_cache_spec_kind")
    if kind and kind not in _WHOLE:
        return None
    hashes, size = _hashes(fields["block_hashes"]), int(fields["block_size"])
    tokens, parent = packed(fields["token_ids"]), fields.get("parent_block_hash")
    if size < 1 or (tokens and len(tokens) != 4 * size * len(hashes)):
        raise ValueError("tokens that do not fill the blocks")
    lora, number = _name(fields.get("lora_name")), fields.get("lora_id")
    if number is not None and not isinstance(number, int):
        raise ValueError("adapter")
    return BlocksStored(
        hashes=hashes,
        parent=None if parent is None else _hashes([parent])[0],
        tokens=tokens,
        block_size=size,
        lora=lora or ("" if number is None else f"#{number}"),
        medium=_medium(fields),
        keys=_keys(fields.get("extra_keys"), len(hashes), lora),
        group=_group(fields),
    )


def _hashes(given: Any) -> list[int | bytes]:
    if not isinstance(given, list) or not _NAMES.issuperset(map(type, given)):
        raise ValueError("block hashes")
    if any(len(name) > LONGEST_HASH for name in given if isinstance(name, bytes)):
        raise ValueError("block hashes that are no hashes")
    return given


def _medium(fields: dict[str, Any]) -> str:
    return (_name(fields.get("medium")) or DEFAULT_MEDIUM).lower()


def _group(fields: dict[str, Any]) -> int:
    group = fields.get("group_idx") or 0
    if not isinstance(group, int):
        raise ValueError("group")
    return group


def _name(given: Any) -> str:
    """Return a name; empty for None."""
    if given is None:
        return ""
    if not isinstance(given, str) or len(given) > LONGEST_NAME:
        raise ValueError("name")
    return given


def _keys(given: Any, blocks: int, lora: str) -> Sequence[Sequence[Any] | None]:
    """Return the extra keys without the adapter's name, which comes first in every block's."""
    if not given:
        return ()
    if not isinstance(given, list) or len(given) != blocks or not all(map(_are_keys, given)):
        raise ValueError("extra keys")
    if lora:
        given = [keys[1:] if keys and keys[0] == lora else keys for keys in given]
    return [keys or None for keys in given] if any(given) else ()


def _are_keys(given: Any) -> bool:
    """Return whether these are the extra keys of a block: values, and lists of values such as a hash and an offset."""
    if not isinstance(given, list):
        return given is None
    return not any(isinstance(part, dict | list) for key in given if isinstance(key, list) for part in key)
