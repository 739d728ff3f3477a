"""Prompts as chains of block hashes: equal hashes mean equal prompts up to the end of their block."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import pairwise, repeat, takewhile
from sys import byteorder

from xxhash import xxh3_64_intdigest

from proxy.core.request import BYTES_PER_TOKEN, Prompt, frozen

PER_DOUBLING = 32
"""Hashes per doubling of the depth. The first 64 blocks have one hash each, the next 64 one for two, and no hash stands
for more than 1/32 of what precedes it: 128 KB are 160 hashes instead of 512, and take 22 us instead of 52. Pods hit 0.1
points less at most, and the index knows 0.2 less (docs/notes/prefix-index.md). With 16, a prompt of 128 KB would take 6
us less, and the index would know 1.0 points less of conversations."""


def _depth(hashes: int) -> int:
    doublings, further = divmod(hashes, PER_DOUBLING)
    return (PER_DOUBLING + further) << (doublings - 1) if doublings else further


DEPTHS: tuple[int, ...] = tuple(map(_depth, range(30 * PER_DOUBLING)))
"""The blocks that the first n hashes of any chain stand for; enough for terabytes, so there is no limit."""


@frozen
class PieceCuts:
    """In bytes: `ends` are the ends of the pieces of a part, starting with 0, `sizes` their lengths; up to `even` all
    have the length `first`."""

    ends: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    even: int


def cuts(depths: Sequence[int], block_bytes: int) -> PieceCuts:
    """`depths` of the hashes, from 0."""
    ends = tuple([depth * block_bytes for depth in depths])
    sizes = tuple([end - start for start, end in pairwise(ends)])
    return PieceCuts(ends, sizes, block_bytes, sum(takewhile(block_bytes.__eq__, sizes)))


ASSISTANT = b"\nassistant\n"
_NEXT = (b"\nuser\n", b"\ntool\n")

Chain = list[int]
"""Hashes of the pieces of one prompt, each seeded with the one before it. The cuts depend on the depth alone, so equal
prompts have equal chains."""


@lru_cache(maxsize=32)
def namespace(model: str, salt: str) -> int:
    """Return the seed of every chain of a model and cache_salt; a LoRA adapter is a model of its own. Few are cached,
    because clients choose names and salts of any length."""
    name = model.encode("utf-8", "surrogatepass")
    return xxh3_64_intdigest(b"%d:%b%b" % (len(name), name, salt.encode("utf-8", "surrogatepass")))


def chain(part: bytes, seed: int, where: PieceCuts) -> Chain:
    """Return the xxh3_64 of every piece of a part, seeded with the hash before it. A last partial piece counts; bytes
    beyond the last cut do not."""
    length = len(part)
    # Where each hash stands for one block, dividing is faster than looking for the end.
    number = -(-length // where.first) if length <= where.even else bisect_left(where.ends, length)
    return chained(map(BytesIO(part).read, where.sizes[:number]), seed)


def chained(pieces: Iterable[bytes], seed: int) -> Chain:
    """Return the xxh3_64 of each piece, seeded with the hash before it."""
    hashes = [seed]
    # The list grows by what is made of its last entry, so the seeds come from the list itself: no bytecode per piece.
    hashes.extend(map(xxh3_64_intdigest, pieces, hashes))
    del hashes[0]
    return hashes


def packed(ids: Sequence[int]) -> bytes:
    """Return token ids as the bytes that are hashed: four each, in little-endian order."""
    words = array("I", ids)
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()


def chains(prompt: Prompt, model: str, block_tokens: int, max_blocks: int) -> tuple[Chain, ...]:
    """Return one chain per part, each starting from the namespace; `max_blocks` limits the whole request, first parts
    first."""
    seed, parts, where = namespace(model, prompt.salt), prompt.parts, _cuts(block_tokens, max_blocks)
    if len(parts) == 1 and parts[0]:
        return (chain(parts[0], seed, where),)
    found: list[Chain] = []
    for part in parts:
        if max_blocks <= 0:
            break
        if hashes := chain(part, seed, where)[: bisect_right(DEPTHS, max_blocks) - 1]:
            found.append(hashes)
            max_blocks -= DEPTHS[len(hashes)]
    return tuple(found)


@frozen
class ConversationTurn:
    """The last turn of a conversation: `key` is the last hash of the prompt before the last response, which shares its
    first `hashes` with the whole. `blocks`: whole blocks from the start of the prompt to the end of that response,
    which takes `response_bytes`."""

    key: int
    hashes: int
    blocks: int
    response_bytes: int


def last_turn(
    part: bytes, model: str, salt: str, hashes: Chain, block_tokens: int, max_blocks: int
) -> ConversationTurn | None:
    """Return the last turn of a conversation as `openai.prompts` renders it: a prompt ends with a line, a response
    begins with its role on a line of its own. Text that only looks like it leads to a key that no prompt has."""
    start = part.rfind(ASSISTANT) + 1
    where = _cuts(block_tokens, max_blocks)
    if not start or start >= where.ends[-1]:
        return None
    before = bisect_right(where.ends, start) - 1
    seed = hashes[before - 1] if before else namespace(model, salt)
    tail = part[where.ends[before] : start]
    key = xxh3_64_intdigest(tail, seed) if tail else seed
    text = start + len(ASSISTANT) - 1
    end = min([at for at in map(part.find, _NEXT, repeat(text)) if at >= 0], default=len(part))
    return ConversationTurn(key, before, min(end, where.ends[-1]) // (block_tokens * BYTES_PER_TOKEN), end - text)


@lru_cache(maxsize=32)
def _cuts(block_tokens: int, max_blocks: int) -> PieceCuts:
    return cuts(DEPTHS[: bisect_right(DEPTHS, max_blocks)], block_tokens * BYTES_PER_TOKEN)
