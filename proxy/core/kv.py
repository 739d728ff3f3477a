"""What engines say of their KV caches, in whatever format they say it, and where they say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BlockHash = int | bytes
"""How an engine names a block; it means something to that process alone."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks that a tier (`medium`, lower case) holds from here on. `tokens` are the token ids of all of
    them, packed as little-endian 32-bit integers; empty for blocks that another tier has already. `parent` is the block
    before the first one, None at the start of a prompt. `keys` has what else tells each block from others with the same
    tokens: media, cache_salt; or nothing at all."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: bytes
    block_size: int
    lora: str = ""
    medium: str = "gpu"
    keys: Sequence[Sequence[Any] | None] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: Sequence[BlockHash]
    medium: str = "gpu"
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """No tier holds anything."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class KvSources:
    """Where pods publish. `{host}` is the pod's host and `{port}` the port; of several data-parallel ranks each has its
    own, one after the other. `port` and `replay_port` stand for pods without a label that says otherwise; `replay_port`
    0: nobody can be asked for what was missed. With `bind`, pods connect to that address instead, and their topics say
    who they are."""

    endpoint: str = "tcp://{host}:{port}"
    port: int = 5557
    replay_port: int = 0
    ranks: int = 1
    topic: str = ""
    bind: str = ""
