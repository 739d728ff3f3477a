"""How a request names the data-parallel rank that is to answer it.

vLLM reads the header, from 0.10 on. SGLang reads the header in newer versions, and the field of the body in all.
"""

from __future__ import annotations

from functools import lru_cache

from proxy.core.endpoint import Endpoint

RANK_HEADER = "x-data-parallel-rank"

FIELD = "data_parallel_rank"

ENGINES_WITH_FIELD = ("sglang",)


@lru_cache(maxsize=1024)
def rank_line(rank: int) -> bytes:
    return b"%b: %d\r\n" % (RANK_HEADER.encode(), rank)


def body_for(endpoint: Endpoint, body: bytes) -> bytes:
    """Return the body with the rank of the endpoint in it, where its engine reads it there. The field comes last, so it
    replaces one of the same name."""
    if endpoint.rank is None or endpoint.engine not in ENGINES_WITH_FIELD:
        return body
    trimmed = body.strip()
    if not (trimmed.startswith(b"{") and trimmed.endswith(b"}")):
        return body
    inside = trimmed[:-1].rstrip()
    comma = b"" if inside == b"{" else b","
    return b'%b%b"%b":%d}' % (inside, comma, FIELD.encode(), endpoint.rank)
