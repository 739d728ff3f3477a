"""Files of other programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

TEMPLATE = "it looks like the template of a chart; take what `helm template` makes of it"


class Unreadable(Exception):
    """It is not what it was taken for; says why."""


def read(path: Path) -> Any:
    """YAML or JSON; references to the environment stay as they are. Raises Unreadable."""
    return parse(_text(path), str(path))


def read_all(path: Path) -> list[Any]:
    """As `read`, of a file that may hold several documents, as manifests do."""
    return _parsed(_text(path), str(path), lambda text: list(yaml.safe_load_all(text)))


def parse(text: str, source: str) -> Any:
    """As `read`."""
    return _parsed(text, source, yaml.safe_load)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from None


def _parsed(text: str, source: str, load: Callable[[str], T]) -> T:
    try:
        return load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = TEMPLATE if "{{" in text else " ".join(str(error).split())
        raise Unreadable(f"{source} is no YAML: {why}") from None


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
