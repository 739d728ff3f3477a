"""Files of other programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy import yaml_source
from proxy.core.errors import ConfigError

TEMPLATE = "it looks like the template of a chart; take what `helm template` makes of it"


class Unreadable(Exception):
    """It is not what it was taken for; says why."""


def read(path: Path) -> Any:
    """YAML or JSON; references to the environment stay as they are. Raises Unreadable."""
    return parse(_text(path), str(path))


def read_all(path: Path) -> list[Any]:
    """As `read`, of a file that may hold several documents, as manifests do. Raises Unreadable."""
    return _documents(_text(path), str(path))


def parse(text: str, source: str) -> Any:
    """As `read`."""
    documents = _documents(text, source)
    if len(documents) > 1:
        raise Unreadable(f"{source} holds several documents")
    return documents[0] if documents else None


def _text(path: Path) -> str:
    try:
        return yaml_source.text_of(path)
    except ConfigError as error:
        raise Unreadable(str(error)) from None


def _documents(text: str, source: str) -> list[Any]:
    try:
        return yaml_source.read_documents(text, source)
    except ConfigError as error:
        raise Unreadable(f"{source} is no YAML: {TEMPLATE}" if "{{" in text else f"is no YAML: {error}") from None


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
