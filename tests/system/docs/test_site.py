"""The site of the pages is built, leads nowhere that is not there, and fetches nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers.docs.pages import ROOT

FETCHED = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}

_URL = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")
_ELSEWHERE = re.compile(r"(?:[a-z]+:)?//")


@dataclass
class Html(HTMLParser):
    """What a page fetches, where it leads, and where one can lead to in it."""

    fetched: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (tag, name) in FETCHED:
                self.fetched.append(value)
            elif value and (tag, name) == ("a", "href"):
                self.links.append(value)
            elif value and name == "id":
                self.ids.add(value)
            elif value and name == "class":
                self.classes |= set(value.split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: make docs")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(build, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    return {file: read(file) for file in site.rglob("*.html") if file.name != "404.html"}


def read(file: Path) -> Html:
    page = Html()
    page.feed(file.read_text())
    return page


def test_the_front_page_is_the_readme(pages: dict[Path, Html], site: Path) -> None:
    assert {"two-commands", "how-it-decides"} <= pages[site / "index.html"].ids


def test_pages_from_other_folders_are_in_the_site(pages: dict[Path, Html], site: Path) -> None:
    there = {file.relative_to(site).as_posix() for file in pages}
    assert {"performance.html", "contributing.html"} <= there
    assert {"files/config/index.html", "files/config/latency.yaml.html", "files/proxy/core/plugin.py.html"} <= there


def test_every_link_in_the_site_is_valid(pages: dict[Path, Html], site: Path) -> None:
    """Files too, and places in pages: `mkdocs build --strict` does not look at what it makes of raw HTML."""
    for file, page in pages.items():
        for link in local(page.links):
            path, _, anchor = unquote(link).partition("#")
            target = (file.parent / path).resolve() if path else file
            assert target.is_relative_to(site), f"{file.relative_to(site)}: {link}"
            assert target.exists(), f"{file.relative_to(site)}: {link}"
            assert not anchor or target.suffix != ".html" or anchor in pages[target].ids, f"{file.name}: {link}"


def test_the_site_fetches_nothing_from_other_sites(pages: dict[Path, Html], site: Path) -> None:
    for file, page in pages.items():
        assert not [url for url in page.fetched if _ELSEWHERE.match(url)], file
    for sheet in site.rglob("*.css"):
        assert not [url for url in _URL.findall(sheet.read_text()) if _ELSEWHERE.match(url)], sheet


def test_no_element_makes_the_theme_fetch_a_script(pages: dict[Path, Html]) -> None:
    """Diagrams and counts of stars come from elsewhere."""
    used = set[str]().union(*(page.classes for page in pages.values()))
    assert not used & {"mermaid", "md-source"}


def test_every_fetched_file_exists(pages: dict[Path, Html], site: Path) -> None:
    for file, page in pages.items():
        for link in local(page.fetched):
            assert (file.parent / unquote(link).partition("?")[0]).exists(), f"{file.relative_to(site)}: {link}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda file: file.name)
def test_a_picture_has_a_dark_mode_and_a_description(picture: Path) -> None:
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"<title[^>]*>\S", text)
    assert not re.search(r"href=|url\((?!#)|<script", text)


def local(links: list[str]) -> Iterator[str]:
    return (link for link in links if not _ELSEWHERE.match(link) and not link.startswith(("mailto:", "javascript:")))
