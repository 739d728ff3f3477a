"""A prompt as chains of block hashes: equal hashes mean equal prompts up to the end of that block."""

from __future__ import annotations

from functools import lru_cache, partial
from io import BytesIO
from itertools import islice

from xxhash import xxh3_64_intdigest

from proxy.core.request import BYTES_PER_TOKEN, Prompt

Chain = list[int]
"""Hashes of the blocks of one prompt, each seeded with the one before it."""


@lru_cache(maxsize=32)
def namespace(model: str, salt: str) -> int:
    """The seed of every chain of a model and cache_salt; a LoRA adapter is a model of its own name. Few are remembered,
    since clients may choose names and salts of any length."""
    name = model.encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(b"%d:%b%b" % (len(name), name, salt.encode("utf-8", "surrogatepass")))


def chain(part: bytes, seed: int, block_bytes: int, max_blocks: int) -> Chain:
    """xxh3_64 of every block of a part, seeded with the hash before it; a last partial block counts as a block."""
    blocks = islice(iter(partial(BytesIO(part).read, block_bytes), b""), max_blocks)
    hashes = [seed]
    # The list grows by what is made of its last entry, so the seeds come from the list itself: no bytecode per block.
    hashes.extend(map(xxh3_64_intdigest, blocks, hashes))
    del hashes[0]
    return hashes


def chains(prompt: Prompt, model: str, block_tokens: int, max_blocks: int) -> tuple[Chain, ...]:
    """One chain per part, each from the namespace on; `max_blocks` bounds the request as a whole, first parts first."""
    seed, parts = namespace(model, prompt.salt), prompt.parts
    if len(parts) == 1 and parts[0]:
        return (chain(parts[0], seed, block_tokens * BYTES_PER_TOKEN, max_blocks),)
    found: list[Chain] = []
    for part in parts:
        if hashes := chain(part, seed, block_tokens * BYTES_PER_TOKEN, max_blocks):
            found.append(hashes)
            max_blocks -= len(hashes)
    return tuple(found)
