"""A prompt as chains of block hashes: equal hashes mean equal prompts up to the end of that block."""

from __future__ import annotations

from functools import lru_cache
from struct import Struct

from xxhash import xxh3_64_intdigest

from proxy.core.request import BYTES_PER_TOKEN, Prompt

Chain = list[int]
"""Hashes of the blocks of one prompt, each seeded with the one before it."""


def namespace(model: str, salt: str) -> int:
    """The seed of every chain of a model and cache_salt; a LoRA adapter is a model of its own name."""
    name = model.encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(b"%d:%b%b" % (len(name), name, salt.encode("utf-8", "surrogatepass")))


def chain(part: bytes, seed: int, block_bytes: int, max_blocks: int) -> Chain:
    """xxh3_64 of every block of a part, seeded with the hash before it; a last partial block counts as a block."""
    whole = min(len(part) // block_bytes, max_blocks)
    end = whole * block_bytes
    blocks = _blocks(block_bytes).iter_unpack(memoryview(part)[:end])
    hashes = [seed := xxh3_64_intdigest(block, seed) for (block,) in blocks]
    if whole < max_blocks and end < len(part):
        hashes.append(xxh3_64_intdigest(part[end:], seed))
    return hashes


def chains(prompt: Prompt, model: str, block_tokens: int, max_blocks: int) -> tuple[Chain, ...]:
    """One chain per part, each from the namespace on; `max_blocks` bounds the request as a whole, first parts first."""
    seed = namespace(model, prompt.salt)
    found: list[Chain] = []
    for part in prompt.parts:
        if max_blocks <= 0:
            break
        hashes = chain(part, seed, block_tokens * BYTES_PER_TOKEN, max_blocks)
        if hashes:
            found.append(hashes)
            max_blocks -= len(hashes)
    return tuple(found)


@lru_cache(maxsize=16)
def _blocks(block_bytes: int) -> Struct:
    """Cuts bytes into blocks without a step of Python per block."""
    return Struct(f"{block_bytes}s")
