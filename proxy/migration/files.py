"""Files of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class Unreadable(Exception):
    """It is not what it was taken for; says why."""


def read(path: Path) -> Any:
    """YAML or JSON; references to the environment stay as they are. Raises Unreadable."""
    try:
        return parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from None


def parse(text: str, source: str) -> Any:
    """As `read`."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise Unreadable(f"{source} is no YAML: {' '.join(str(error).split())}") from None


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """None is an empty one. Raises Unreadable."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Unreadable(f"{what} must be a mapping")
    return value


def items(value: Any, what: str) -> list[Any]:
    """None is an empty one. Raises Unreadable."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Unreadable(f"{what} must be a list")
    return value
