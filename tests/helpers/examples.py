"""How many examples Hypothesis makes of a test."""

from __future__ import annotations

from hypothesis import settings

FEWER = 4
LEAST = 10


def examples(count: int) -> int:
    """All of them in `make test-all`; a part in `make test`, which is to be quick."""
    return max(count // FEWER, min(count, LEAST)) if settings().derandomize else count
