"""The pages are true: links, code, metric names and reasons; and they stay short."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy import __version__
from proxy.core.errors import Reason, RequestError
from proxy.telemetry.metrics import Catalogue
from tests.helpers.docs.greenest import MODULE
from tests.helpers.docs.pages import PACKAGE, PAGES, ROOT, blocks

OPERATING = ROOT / "docs" / "operating.md"

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_REASON_ROW = re.compile(r"^\| `([a-z-]+)` \| (\d{3}) \|", re.MULTILINE)
_SERIES = re.compile(r"\bkvlane_[a-z_]+")


def links(page: Path) -> list[str]:
    return [link for link in _LINK.findall(_FENCED.sub("", page.read_text())) if "://" not in link]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_is_valid(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page.suffix == ".md" and page not in reached:
            reached.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
    assert set(PAGES) <= reached


def test_the_readme_and_the_guide_for_contributors_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50


def test_the_plugins_shown_are_the_files_of_the_package() -> None:
    shown = {block.text for block in blocks("python") if "@plugin(" in block.text}
    files = (PACKAGE / MODULE / f"{name}.py" for name in ("label_scorer", "forecast", "prefill_decider"))
    assert shown == {file.read_text() for file in files}


def test_the_entry_points_shown_are_those_of_the_package() -> None:
    installed = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    shown = [tomllib.loads(block.text)["project"]["entry-points"] for block in blocks("toml")]
    assert shown
    assert all(one == installed for one in shown)


def test_every_named_series_exists() -> None:
    texts = (re.sub(r"^Removed series: .*$", "", page.read_text(), flags=re.MULTILINE) for page in PAGES)
    named = {name for text in texts for name in _SERIES.findall(text)} - {"kvlane_greenest"}
    assert len(named) >= 5
    assert named <= set(Catalogue(__version__).sample_names)


def test_every_reason_is_documented_with_its_status() -> None:
    rows = {reason: int(status) for reason, status in _REASON_ROW.findall(OPERATING.read_text())}
    statuses = {cls.reason.value: cls.status for cls in errors(RequestError)}
    used = {getattr(Reason, name).value for name in _reasons_in_the_source()}
    assert set(rows) == used
    assert rows == statuses


def errors(cls: type[RequestError]) -> Iterator[type[RequestError]]:
    yield cls
    for below in cls.__subclasses__():
        if below.__module__.startswith("proxy."):
            yield from errors(below)


def _reasons_in_the_source() -> set[str]:
    sources = (path.read_text() for path in (ROOT / "proxy").rglob("*.py"))
    return {name for source in sources for name in re.findall(r"\bReason\.([A-Z_]+)\b", source)}


def test_the_architecture_names_every_package_in_its_layer() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {path.parent.name for path in (ROOT / "proxy").glob("*/__init__.py")}
    tree = page.partition("```text\n")[2].partition("```")[0]
    assert set(re.findall(r"(\w+)/ ", tree)) == packages
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    ordered = [packages & set(layer.split(" : ")) for layer in layers]
    rows = re.findall(r"^\| [1-8] \| (.+) \|$", page, re.MULTILINE)
    assert [packages & set(row.split(", ")) for row in rows] == ordered
