"""Make the site of texts where they stand: README as its front page, and what links lead to outside of docs/ as pages.

mkdocs calls the functions that begin with `on_`. A page of the repository is named by its path from the top of it, as
`bench/README.md`; a page of the site by its path in the site, as `performance.md`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FROM_ELSEWHERE = {"README.md": "index.md", "bench/README.md": "performance.md", "CONTRIBUTING.md": "contributing.md"}
SHOWN = "files"
"""The folder of the site for what is no page: configurations, sources."""
LANGUAGES = {".cfg": "haproxy", ".conf": "nginx", ".json": "json", ".md": "markdown", ".py": "python"}
LANGUAGES |= {".service": "systemd", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\[[^\]]+\]\()([^)\s]+)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in FROM_ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    for path in sorted(_with_what_is_in_folders(_linked(files))):
        files.append(File.generated(config, place(path), content=_shown(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    path = _origin(page.file.src_uri)
    return markdown if path is None else _with_links(markdown, partial(_rewritten, path, page.file.src_uri))


def place(path: str) -> str:
    """Where the site has what the repository has at `path`."""
    if path in FROM_ELSEWHERE:
        return FROM_ELSEWHERE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SHOWN}/{path}/index.md" if (ROOT / path).is_dir() else f"{SHOWN}/{path}.md"


def _origin(page: str) -> str | None:
    """Return the path of a page whose text is in the repository, or None for a page that is made here."""
    named = {page: path for path, page in FROM_ELSEWHERE.items()}
    return named.get(page, None if page.startswith(f"{SHOWN}/") else f"docs/{page}")


def _linked(files: Files) -> set[str]:
    """What pages link to that is neither a page nor beside them."""
    pages = {path for file in files.documentation_pages() if (path := _origin(file.src_uri))}
    targets = {target for path in pages for target in _targets(path)}
    elsewhere = {path for path in targets if path not in FROM_ELSEWHERE and not path.startswith("docs/")}
    return {path for path in elsewhere if (ROOT / path).exists()}


def _targets(path: str) -> Iterator[str]:
    for part in _FENCED.split((ROOT / path).read_text())[::2]:
        for found in _LINK.finditer(part):
            if "://" not in found[2] and not found[2].startswith("#"):
                yield _target(path, found[2])


def _target(path: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link.partition("#")[0]))


def _with_what_is_in_folders(paths: set[str]) -> set[str]:
    return paths | {below for path in paths for below in _below(path)}


def _below(path: str) -> Iterator[str]:
    for child in _children(path):
        yield child
        yield from _below(child)


def _children(path: str) -> list[str]:
    """Of a folder the folders and what can be shown, in the order of their names."""
    found = sorted((ROOT / path).iterdir()) if (ROOT / path).is_dir() else []
    shown = (child for child in found if child.suffix in LANGUAGES or (child.is_dir() and child.name[0] not in "._"))
    return [child.relative_to(ROOT).as_posix() for child in shown]


def _shown(path: str) -> str:
    head = f"---\nsearch:\n  boost: 0.5\n---\n\n# {path}\n\n"
    if (ROOT / path).is_dir():
        return head + "".join(_row(path, child) for child in _children(path))
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"{head}``````{language}\n{(ROOT / path).read_text().rstrip()}\n``````\n"


def _row(folder: str, child: str) -> str:
    link = posixpath.relpath(place(child), posixpath.dirname(place(folder)))
    says = _first_comment(ROOT / child)
    name = posixpath.basename(child) + ("/" if (ROOT / child).is_dir() else "")
    return f"- [{name}]({link}){': ' if says else ''}{says}\n"


def _first_comment(file: Path) -> str:
    """The sentence that a configuration begins with."""
    if file.suffix not in (".yaml", ".yml"):
        return ""
    lines = file.read_text().splitlines()
    comment = next((at for at, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.lstrip("# ") for line in lines[:comment]).partition(". ")[0].rstrip(".:")


def _with_links(markdown: str, rewrite: partial[str]) -> str:
    parts = _FENCED.split(markdown)
    parts[::2] = (_LINK.sub(lambda found: found[1] + rewrite(found[2]) + found[3], part) for part in parts[::2])
    return "".join(parts)


def _rewritten(path: str, page: str, link: str) -> str:
    """A link as the site needs it: from page to page."""
    if "://" in link or link.startswith("#"):
        return link
    anchor = link.partition("#")[2]
    there = posixpath.relpath(place(_target(path, link)), posixpath.dirname(page) or ".")
    return f"{there}#{anchor}" if anchor else there
