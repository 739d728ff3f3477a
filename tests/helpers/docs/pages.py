"""The pages a user reads, and what stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "tests" / "packages" / "kvlane-greenest"
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: `page:line` is where it stands."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in _blocks(page) if block.language == language]


def yaml_blocks(kind: str) -> list[Block]:
    """`pods` are lists, `situations` what `kvlane explain` takes, `configurations` all others."""
    return [block for block in blocks("yaml") if _kind(yaml.safe_load(block.text)) == kind]


def sessions(prompt: str) -> list[tuple[str, str]]:
    """What text blocks show of a terminal: a command that begins with `prompt`, and its output."""
    shown = [block.text for block in blocks("text") if block.text.startswith(f"$ {prompt}")]
    return [(head.removeprefix("$ "), output) for head, _, output in (text.partition("\n") for text in shown)]


def commands() -> list[str]:
    """Every line of the shell blocks, without its comment, and the commands of the sessions."""
    lines = [line.split("  #")[0].strip() for block in blocks("sh") for line in block.text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")] + [line for line, _ in sessions("kvlane")]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2])


def _kind(data: Any) -> str:
    if isinstance(data, list):
        return "pods"
    return "situations" if "endpoints" in data else "configurations"
