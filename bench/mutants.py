"""Share of small faults that the unit tests of a package miss: `python bench/mutants.py [PACKAGE…]`.

Each mutant is a copy of kvlane with one fault: a comparison with another operator, a number that is off by one, `and`
for `or`, a negated condition, plus for minus, `return None`, or a statement removed. A mutant survives if
`tests/unit/PACKAGE` passes. `--seed` chooses the sample. Log lines, texts of errors, annotations, decorators and
declarations of settings are not changed. docs/notes/mutation.md has the results.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import cache_from_source
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CORE = ("prefix", "scheduling", "latency", "flowcontrol", "reliability")
COPIED = ("proxy", "tests", "config", "docs", "bench", "pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
REMOVABLE = (ast.Expr, ast.AugAssign, ast.Delete, ast.Continue, ast.Break)
LOGGERS = {"log", "logger", "logging", "_log", "LOG"}
SKIPPED = {"annotation", "returns", "decorator_list", "type_params", "args"}


class Mutant(NamedTuple):
    path: str
    line: int
    change: str
    source: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=CORE)
    parser.add_argument("--sample", type=int, default=25, help="mutants per package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of a run of the tests")
    parser.add_argument("--only", action="append", help="FILE:LINE: all mutants of a line instead of a sample")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, tree / name)
        for package in options.packages:
            if _run(tree, package, options.seconds) != "survived":
                sys.exit(f"tests/unit/{package} fails without a mutant")
            found = [each for path in sorted((ROOT / "proxy" / package).glob("*.py")) for each in mutants(path)]
            chosen = random.Random(options.seed).sample(found, min(options.sample, len(found)))
            if options.only:
                chosen = [each for each in found if f"{each.path}:{each.line}" in options.only]
            counts = Counter(_outcome(tree, package, mutant, options.seconds) for mutant in chosen)
            print(f"{package}: {len(chosen)} of {len(found)} mutants: {dict(counts)}", flush=True)


def mutants(path: Path) -> Iterator[Mutant]:
    tree = ast.parse(path.read_text())
    for parent, name, index in list(_sites(tree)):
        before = getattr(parent, name) if index is None else getattr(parent, name)[index]
        for after in _changed(before):
            _put(parent, name, index, after)
            line = getattr(before, "lineno", 0) or getattr(parent, "lineno", 0)
            inside, source = isinstance(parent, ast.expr), ast.unparse(tree)
            new = ast.unparse(parent if inside else after)
            _put(parent, name, index, before)
            old = ast.unparse(parent if inside else before)
            start = max(0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))) - 40)
            change = "  ->  ".join(text[start:].split("\n", 1)[0][:100] for text in (old, new))
            yield Mutant(str(path.relative_to(ROOT)), line, change, source)


def _put(parent: ast.AST, name: str, index: int | None, node: ast.AST) -> None:
    setattr(parent, name, node) if index is None else getattr(parent, name).__setitem__(index, node)


def _sites(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    for name, value in ast.iter_fields(node):
        if name in SKIPPED and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if isinstance(child, ast.AST) and not _excluded(child):
                yield node, name, index
                yield from _sites(child)


def _excluded(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        return isinstance(called, ast.Name) and called.id in LOGGERS | {"param"}
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _excluded(node.value)
    only_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return only_types or isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the replacements of a node, one for each fault."""
    if isinstance(node, ast.cmpop | ast.boolop | ast.operator) and type(node) in SWAPPED:
        yield SWAPPED[type(node)]()
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield from (ast.Constant(node.value + step) for step in (1, -1))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield type(node)(**(vars(node) | {"test": ast.UnaryOp(ast.Not(), node.test)}))
    elif isinstance(node, ast.Return) and node.value and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, REMOVABLE) or (isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name)):
        yield ast.Pass()


def _outcome(tree: Path, package: str, mutant: Mutant, seconds: float) -> str:
    path = tree / mutant.path
    path.write_text(mutant.source)
    compiled = Path(cache_from_source(str(path)))
    compiled.unlink(missing_ok=True)  # the time in a compiled module has whole seconds only
    outcome = _run(tree, package, seconds)
    print(f"{outcome:8} {mutant.path}:{mutant.line}: {mutant.change}", flush=True)
    shutil.copy2(ROOT / mutant.path, path)
    compiled.unlink(missing_ok=True)
    return outcome


def _run(tree: Path, package: str, seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-xq", "-pno:cacheprovider", "-pno:xdist", f"tests/unit/{package}"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        run = subprocess.run(command, cwd=tree, timeout=seconds, capture_output=True, env=environment)
    except subprocess.TimeoutExpired:
        return "timeout"
    return "killed" if run.returncode else "survived"


if __name__ == "__main__":
    main()
