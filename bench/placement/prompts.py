"""The text of a prompt, for routers that read it, and the blocks an engine makes of it."""

from __future__ import annotations

import orjson
from xxhash import xxh3_128_hexdigest

from bench.placement.workload import CHUNK, Job

BYTES_PER_TOKEN = 4


def text(job: Job) -> bytes:
    """Four characters to the token; the same id is the same text everywhere."""
    return b"".join(map(_chunk, job.ids))[: job.prompt_tokens * BYTES_PER_TOKEN]


def body(job: Job, model: str) -> bytes:
    """A streamed completion: no chat template stands between the text and the engine's blocks."""
    return (
        b'{"model":%b,"stream":true,"max_tokens":%d,"ignore_eos":true,"stream_options":{"include_usage":true},"prompt":"%b"}'
        % (
            orjson.dumps(model),
            job.output_tokens,
            text(job),
        )
    )


def parts(job: Job, block_size: int) -> tuple[tuple[int, int], ...]:
    """The whole blocks of the prompt, by chunk; `block_size` divides 512."""
    per_chunk = CHUNK // block_size
    whole = job.prompt_tokens // block_size
    full, rest = divmod(whole, per_chunk)
    found = [(node, per_chunk) for node in job.nodes[:full]]
    if rest:
        found.append((job.nodes[full], rest))
    return tuple(found)


def _chunk(identity: int) -> bytes:
    return xxh3_128_hexdigest(identity.to_bytes(8, "little", signed=True)).encode() * (CHUNK * BYTES_PER_TOKEN // 32)
