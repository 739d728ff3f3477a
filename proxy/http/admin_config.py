"""The configuration as it may be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "***"

_SECRET = re.compile(r"(?:^|\.)(?:\w*apiKeys?|\w*password|\w*secret|\w*token)(?:\[\d+\])?(?:\.|$)", re.IGNORECASE)
"""Names, alone or in a path, whose values are nobody's business."""

_ABOUT = ("origin", "source")
"""What is said about a value beside it."""


def redacted(value: Any, secret: bool = False) -> Any:
    """A copy in which every secret is `***`; one that is not set stays null."""
    if isinstance(value, Mapping):
        return {
            key: item if secret and key in _ABOUT else redacted(item, secret or bool(_SECRET.search(str(key))))
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [redacted(item, secret) for item in value]
    return REDACTED if secret and value is not None else value
