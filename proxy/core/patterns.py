"""Names that a configuration allows, with `*` as a wildcard."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import lru_cache

from proxy.core.errors import LONGEST_NAME


def allows(patterns: frozenset[str] | None, name: str) -> bool:
    """Whether one of the patterns is the name; None allows any."""
    if patterns is None:
        return True
    matches = _matches if len(name) <= LONGEST_NAME else _matches.__wrapped__  # no client fills the memory
    return matches(patterns, name)


def any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_matches = lru_cache(maxsize=4096)(any_matches)
