"""Check the words of code and pages: python bench/words.py [PATH...] prints each private word with the one to use.

Identifiers, docstrings, comments, messages and pages use the words of the field (OpenAI, vLLM, Envoy, Kubernetes), one
per concept, in plain English. `make lint` runs this check. bench/words_allowed.txt names what is not converted yet.
The list can only shrink: an entry that allows nothing any more is an error too.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "bench" / "words_allowed.txt"
SOURCES = ("proxy", "bench", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "bench/README.md", "docs", "config")
SKIPPED = ("bench/words.py", "tests/unit/bench/test_words.py", "docs/changelog.md", "docs/real-engine.md")

NAMES = {
    "leg": "attempt", "legs": "attempts", "journey": "attempt", "rim": "relay context", "story": "continuation",
    "seam": "adapter", "door": "authenticator", "entrance": "admission", "passage": "queue ticket",
    "doubt": "ejection reason", "doubts": "ejection reasons", "doubted": "ejected", "heir": "successor",
    "heirs": "successors", "handoff": "transfer, drain affinity", "handover": "transfer, drain affinity",
    "asking": "probe", "senses": "signals", "outbox": "batch", "hub": "broker", "told": "published, reported",
    "heard": "received", "said": "reported", "asked": "queried, requested", "look": "read", "take": "acquire",
    "begin": "start", "follow": "replace, reuse", "room": "capacity, package", "rooms": "packages",
    "cautions": "warnings",
    "among": "cluster", "beside": "name the model", "duty": "name the model", "answer": "response",
    "answers": "responses", "answered": "responded", "anew": "again", "nobody": "none", "whoever": "name the noun",
    "somebody": "name the noun", "journeys": "attempts", "lane": "attempt", "lanes": "attempts", "sink": "writer",
    "sinks": "writers", "warming": "warm-up",
}  # fmt: skip
"""A word of an identifier -> what to write instead."""

PROSE = {
    r"legs?": "attempt", r"journeys?": "attempt", r"rim": "relay context", r"seam": "adapter",
    r"heirs?": "successor", r"handoff|handover|hand over|hands over|handed over": "transfer, drain affinity",
    r"outbox": "batch", r"(?:is|are|was|were|been|be) told": "receives, is notified",
    r"(?:is|are|was|were|been|be|have|has) heard": "received", r"(?:is|was|are|were) said": "reported",
    r"what (?:\w+ )?sa(?:id|ys)": "name the noun", r"answer(?:s|ed|ing)?": "response, respond",
    r"who(?:ever| comes| asks)": "name the noun", r"nobody|somebody": "name the noun",
    r"those (?:that|who|of)": "name the noun", r"of which": "a sentence of its own",
    r"(?:is|are|was|were) none": "does not exist", r"there (?:is|are) nothing": "state the fact", r"anew": "again",
    r"of late": "recently", r"hence": "so", r"(?:can|could|cannot|not|to) be had": "is (not) available",
    r"must not be had": "is not available", r"(?:this|the|these|a) rooms?": "package, capacity",
    r"doubts?": "ejection reason",
    r"(?:is|are) away": "is unreachable", r"all the same": "still", r"come of it": "the result", r"as well as": "and",
}  # fmt: skip
"""A pattern of prose -> what to write instead."""

_PROSE = {re.compile(rf"(?<![-\w`/.])(?:{pattern})(?![-\w`/])", re.IGNORECASE): word for pattern, word in PROSE.items()}
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``.*?``|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.DOTALL)


class Finding(NamedTuple):
    path: str
    line: int
    word: str
    instead: str


class Allowance(NamedTuple):
    """`pattern` is a path or a glob; a folder stands for all of its files. `word` is one word, or * for all of them."""

    pattern: str
    word: str

    def covers(self, finding: Finding) -> bool:
        inside = finding.path.startswith(self.pattern.rstrip("/") + "/") or fnmatch(finding.path, self.pattern)
        return inside and self.word in ("*", finding.word)


def in_source(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings of a Python file: its identifiers, docstrings, messages and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 3:
            yield from in_prose(path, node.value, node.lineno)
        for name in _names(node):
            for part in _PART.findall(name):
                if (instead := NAMES.get(part.lower())) is not None:
                    yield Finding(path, getattr(node, "lineno", 1), part.lower(), instead)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from in_prose(path, token.string, token.start[0])


def in_page(path: str, text: str) -> Iterator[Finding]:
    """Yield the findings of a page: code is left out."""
    yield from in_prose(path, _FENCED.sub(lambda match: "\n" * match[0].count("\n"), text), 1)


def in_prose(path: str, text: str, line: int) -> Iterator[Finding]:
    text = _CODE.sub(lambda match: "`" + "\n" * match[0].count("\n"), text)
    for pattern, instead in _PROSE.items():
        for match in pattern.finditer(text):
            if match[0].endswith(" None"):  # the value of Python
                continue
            yield Finding(path, line + text.count("\n", 0, match.start()), " ".join(match[0].lower().split()), instead)


def _names(node: ast.AST) -> Sequence[str]:
    """Return the names that this node declares."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (node.name,)
        case ast.arg():
            return (node.arg,)
        case ast.Name(ctx=ast.Store()):
            return (node.id,)
        case ast.Attribute(ctx=ast.Store()):
            return (node.attr,)
    return ()


def findings(paths: Sequence[str]) -> Iterator[Finding]:
    for path in paths:
        text = (ROOT / path).read_text()
        yield from in_source(path, text) if path.endswith(".py") else in_page(path, text)


def _files(names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        at = ROOT / name
        files = [at] if at.is_file() else [*at.rglob("*.py"), *at.rglob("*.md")]
        found += [str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts]
    return sorted(set(found) - set(SKIPPED))


def allowances() -> list[Allowance]:
    lines = [line.split() for line in ALLOWED.read_text().splitlines() if line and not line.startswith("#")]
    return [Allowance(line[0], " ".join(line[1:]) or "*") for line in lines]


def main(names: Sequence[str]) -> int:
    """Print what is found. Return the exit code."""
    allowed, found = allowances(), list(findings(_files(names or (*SOURCES, *PAGES))))
    bad = found if names else [one for one in found if not any(each.covers(one) for each in allowed)]
    for one in sorted(bad):
        print(f"{one.path}:{one.line}: '{one.word}': write {one.instead}")
    spent = [] if names else [each for each in allowed if not any(map(each.covers, found))]
    for each in spent:
        print(f"{ALLOWED.relative_to(ROOT)}: '{' '.join(each)}' allows nothing any more: remove the line")
    if bad:
        print(f"{len(bad)} words to replace")
    return 1 if bad or spent else 0


if __name__ == "__main__":
    sys.exit(main([str(Path(name).resolve().relative_to(ROOT)) for name in sys.argv[1:]]))
