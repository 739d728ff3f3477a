"""The files of the page, from the package, each with the tag by which browsers keep it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files

PAGE = "page.html"

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    content_type: str
    tag: str


def load() -> dict[str, Asset]:
    """By name: all there are."""
    found = {}
    for file in files("proxy.dashboard").joinpath("page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found
