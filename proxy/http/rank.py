"""How a request names its data-parallel rank. vLLM reads the header since its pull requests 24945 and 29002 of 2025.
SGLang reads the field of the body, and since its pull request 19832 of 2026 the header too; some of its APIs read only
one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest
from proxy.core.ports import Admission
from proxy.core.request import InferenceRequest

RANK_HEADER = "x-data-parallel-rank"

FIELD = "data_parallel_rank"

ENGINES_WITH_FIELD = ("sglang",)


class RankAdmission(Admission):
    """Restricts a request to the rank that its client names, if `security.clientRanks` permits that."""

    holds_for_retries: ClassVar[bool] = True

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Raise BadRequest if no endpoint has that rank."""
        named = request.headers.get(RANK_HEADER)
        if named is None:
            return endpoints
        left = [endpoint for endpoint in endpoints if str(endpoint.rank) == named]
        if not left:
            raise BadRequest(f"X-Data-Parallel-Rank: no pod has a data-parallel rank {named[:16]!r}.")
        return left


def body_for(endpoint: Endpoint, body: bytes) -> bytes:
    """Return the body with the rank of the endpoint, if its engine reads it there. The field comes last, so it
    overrides one of the same name."""
    if endpoint.rank is None or endpoint.engine not in ENGINES_WITH_FIELD:
        return body
    trimmed = body.strip()
    if not (trimmed.startswith(b"{") and trimmed.endswith(b"}")):
        return body
    inside = trimmed[:-1].rstrip()
    comma = b"" if inside == b"{" else b","
    return b'%b%b"%b":%d}' % (inside, comma, FIELD.encode(), endpoint.rank)
