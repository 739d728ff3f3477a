"""Apply the diffs that a page shows: hunks without line numbers, whose old text must be in the file exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def apply(diff: str, folder: Path) -> list[Path]:
    """Change the files below `folder`. Return them. Raise ValueError for a hunk whose old text is not there once."""
    changed = []
    for name, hunks in _files(diff):
        path = folder / name
        text = path.read_text() if path.exists() else ""
        for hunk in hunks:
            old = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "+")
            new = "".join(f"{line[1:]}\n" for line in hunk if line[:1] != "-")
            if old and text.count(old) != 1:
                raise ValueError(f"{name}: the old text of a hunk occurs {text.count(old)} times:\n{old}")
            text = text.replace(old, new) if old else text + new
        path.write_text(text)
        changed.append(path)
    return changed


def _files(diff: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each file with its hunks."""
    for part in diff.split("--- ")[1:]:
        _, target, *lines = part.splitlines()
        hunks: list[list[str]] = []
        for line in lines:
            if line.startswith("@@"):
                hunks.append([])
            else:
                hunks[-1].append(line)
        yield target.removeprefix("+++ b/"), hunks
