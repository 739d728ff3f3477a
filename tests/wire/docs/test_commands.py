"""What the pages say to type can be typed: at the command line, at the two ports, and in Python."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from proxy.cli import main
from proxy.core.errors import RequestError
from proxy.http.paths import Paths
from tests.helpers.docs.pages import ROOT, Block, blocks, commands
from tests.helpers.scenarios.stack import Stack, stack

KVLANE = [words for line in commands() if (words := shlex.split(line))[0].rpartition("/")[2] == "kvlane"]
CURL = [words for line in commands() if (words := shlex.split(line))[0] == "curl"]
OPENAI = [block for block in blocks("python") if "import OpenAI" in block.text]

_INLINE = re.compile(r"`kvlane ([a-z][^`]*)`")


def inline() -> Iterator[list[str]]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for found in _INLINE.finditer(page.read_text()):
            yield ["kvlane", *shlex.split(found[1])]


def until_shell(words: list[str]) -> list[str]:
    """The words up to a pipe or a redirection."""
    return words[: next((at for at, word in enumerate(words) if word in ("|", ">")), len(words))]


@pytest.mark.parametrize("words", [*KVLANE, *inline()], ids=" ".join)
def test_a_command_exists_with_its_options(words: list[str]) -> None:
    _, name, *arguments = until_shell(words)
    with click.Context(main) as parent:
        command = main.get_command(parent, name)
        assert command is not None, f"there is no command {name}"
        if arguments:
            command.make_context(name, arguments, parent=parent)


def test_every_command_is_named_and_has_help() -> None:
    shown = {words[1] for words in [*KVLANE, *inline()]}
    assert {"serve", "check", "plugins", "explain"} <= shown
    for name in shown:
        assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_every_target_of_make_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pages = "".join(
        page.read_text() for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md")
    )
    targets = set(re.findall(r"(?:^|[`&] ?)make ([a-z][a-z-]*)", pages, re.MULTILINE))
    assert {"demo", "test", "bench"} <= targets
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_script_of_the_benchmarks_exists() -> None:
    page = (ROOT / "bench" / "README.md").read_text()
    named = set(re.findall(r"bench/(\w+\.py)", page))
    assert named == {script.name for script in (ROOT / "bench").glob("*.py")}


async def test_the_curl_lines_of_the_admin_port_work_in_their_order() -> None:
    assert CURL
    written: dict[str, str] = {}
    async with stack(2) as s:
        for words in CURL:
            status = await curl(s, words, written)
            assert status < 400, f"{shlex.join(words)}: {status}"


def test_the_pods_that_the_readme_drains_and_removes_are_added_there_by_these_names() -> None:
    page = (ROOT / "README.md").read_text()
    added = set(re.findall(r'"name": "([^"]+)"', page))
    used = set(re.findall(r"/admin/pods/([^/ ]+)|kvlane drain (\S+)", page))
    assert {name or other for name, other in used} <= added


@pytest.mark.parametrize("name", ["queue-scorer", "prefix-cache-scorer"])
def test_the_scorers_of_the_example_with_weights_are_in_the_configuration_that_the_page_names(name: str) -> None:
    page = (ROOT / "docs" / "explain.md").read_text()
    assert f"--weight {name}=" in page
    assert f"pluginRef: {name}" in (ROOT / "config" / "prefix-aware.yaml").read_text()


@pytest.mark.parametrize("block", OPENAI, ids=str)
async def test_the_official_client_works_as_shown(block: Block) -> None:
    async with stack(2) as s:
        code = block.text.replace("http://localhost:8000", s.url)
        assert code != block.text
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            await asyncio.to_thread(exec, code, {})
        assert output.getvalue().strip()


@pytest.mark.parametrize("path", ["/metrics", "/v1/load_lora_adapter", "/sleep", "/abort_requests"])
def test_control_paths_are_not_relayed_as_documented(path: str) -> None:
    with pytest.raises(RequestError) as refused:
        Paths().route("POST", path)
    assert refused.value.status == 404


async def curl(s: Stack, words: list[str], written: dict[str, str]) -> int:
    """The request of a `curl` line, for the few options the pages use; `written` are the files of the lines."""
    method, body, url, headers = "GET", None, "", {}
    rest = iter(until_shell(words)[1:])
    for word in rest:
        if word == "-X":
            method = next(rest)
        elif word == "-d":
            method, body = "POST", next(rest)
        elif word == "--data-binary":
            method, body = "POST", written.get(next(rest).removeprefix("@"), "{}")
        elif word in ("-o", "-w"):
            next(rest)
        elif word == "-H":
            name, _, value = next(rest).partition(": ")
            headers[name] = value
        elif not word.startswith("-"):
            url = word
    target = url.replace("localhost:9190", s.admin).replace("localhost:8000", s.url)
    async with s.http.request(method, target, data=body, headers=headers) as response:
        if ">" in words:
            written[words[-1]] = await response.text()
        return response.status
