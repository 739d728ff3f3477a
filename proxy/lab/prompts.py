"""The text of a prompt, for routers that read it, and the blocks an engine makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import orjson
from xxhash import xxh3_128_hexdigest

from proxy.core.request import BYTES_PER_TOKEN
from proxy.lab.cache import Parts
from proxy.lab.workload import Job


def text(job: Job) -> bytes:
    """Four characters to the token; the same id is the same text everywhere."""
    ends = (0, *job.ends_of(len(job.ids)))
    pieces = [_piece(one, end - begin) for one, (begin, end) in zip(job.ids, pairwise(ends), strict=True)]
    return b"".join(pieces)[: job.text_length * BYTES_PER_TOKEN]


def body(job: Job, model: str) -> bytes:
    """A completion: no chat template stands between the text and the engine's blocks."""
    asked = job.asked
    limit = job.output_tokens if asked.max_tokens is None else asked.max_tokens
    return b'{"model":%b,"stream":%b,%b"ignore_eos":true,%b"prompt":"%b"}' % (
        orjson.dumps(model),
        b"true" if asked.stream else b"false",
        b'"max_tokens":%d,' % limit if limit else b"",
        b'"stream_options":{"include_usage":true},' if asked.stream else b"",
        text(job),
    )


def parts(job: Job, block_size: int) -> Parts:
    """The whole blocks of the prompt, by piece."""
    return _parts(job, job.nodes, job.prompt_tokens // block_size, block_size)


def parts_with_answer(job: Job, block_size: int) -> Parts:
    """Those that are there at the end, for others to find; the last token is said and never computed. Empty if nobody
    goes on from the answer."""
    whole = (job.prompt_tokens + job.output_tokens - 1) // block_size
    return _parts(job, job.continued_nodes, whole, block_size) if job.continued_nodes else ()


def _parts(job: Job, nodes: Sequence[int], whole: int, block_size: int) -> Parts:
    """Where a piece ends does not depend on the prompt, but for the last one, which has all that is left."""
    found, begin = [], 0
    for at, (node, end) in enumerate(zip(nodes, job.ends_of(len(nodes)), strict=True), 1):
        blocks = whole if at == len(nodes) else min(int(end * job.scale) // block_size, whole)
        if blocks > begin:
            found.append((node, blocks - begin))
            begin = blocks
    return tuple(found)


def _piece(identity: int, tokens: int) -> bytes:
    size = tokens * BYTES_PER_TOKEN
    return (xxh3_128_hexdigest(identity.to_bytes(8, "little", signed=True)).encode() * -(-size // 32))[:size]
