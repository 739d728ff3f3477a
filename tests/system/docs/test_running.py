"""What the pages say to type is run, line by line, and what cannot be is looked at; no block is left out."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.helpers.docs.desk import CHAT, laid_out
from tests.helpers.docs.pages import PAGES, ROOT, Block, blocks
from tests.helpers.scenarios.stack import Stack, stack

LANGUAGES = {"diff", "json", "promql", "python", "sh", "text", "toml", "yaml"}
"""Languages whose every block is tested. `promql` and `text` are read for series and sessions."""

LINES = [
    line.split("  #")[0].strip().replace("/var/log/kvlane/", "")
    for block in blocks("sh")
    for line in block.text.splitlines()
]
WORDS = [words for words in map(shlex.split, dict.fromkeys(LINES)) if words]
KVLANE = [words for words in WORDS if words[0].endswith("kvlane")]
STAYS = {"serve", "sim", "demo", "top"}
"""Commands that run for long; tests/system/cli has them. What `serve` is given is checked here."""

OPERATES = {"explain", "doctor", "drain", "undrain"}
"""Commands that ask pods or a proxy, which there are."""

LONG = {"tune": ["--trials", "1"]}
MAY_BE_1 = {"doctor", "import", "tune"}
"""A response of these, as docs/commands.md has it."""


def named(subcommands: set[str]) -> list[list[str]]:
    return [words for words in KVLANE if words[1] in subcommands]


OFFLINE = [words for words in KVLANE if words[1] not in STAYS | OPERATES]
SCRIPTS = sorted({words[1] for words in WORDS if words[0] == "python"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    laid_out(folder)
    return folder


@pytest.fixture
def desk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def run(words: list[str]) -> Result:
    """A line as a shell would run it, as far as the pages need one: `<` is read, `>` and `|` lead away."""
    stdin = Path(words[words.index("<") + 1]).read_text() if "<" in words else None
    end = next((at for at, word in enumerate(words) if word in ("<", ">", "|")), len(words))
    arguments = words[1:end]
    return CliRunner().invoke(main, [*arguments, *LONG.get(arguments[0], [])], input=stdin)


def good(words: list[str], result: Result) -> None:
    codes = (0, 1) if words[1] in MAY_BE_1 else (0,)
    assert result.exit_code in codes, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("words", OFFLINE, ids=shlex.join)
def test_a_documented_command_works(words: list[str], desk: Path) -> None:
    good(words, run(words))


@pytest.mark.parametrize("words", named({"serve"}), ids=shlex.join)
def test_a_served_configuration_is_valid(words: list[str], desk: Path) -> None:
    settings = [pair for pair in itertools.pairwise(words) if pair[0] in ("-c", "--pod")]
    good(words, run([words[0], "check", *itertools.chain.from_iterable(settings)]))


@pytest.mark.parametrize("words", named(OPERATES), ids=shlex.join)
async def test_a_command_that_queries_a_proxy_succeeds(words: list[str], desk: Path) -> None:
    async with used_stack() as s:
        line = re.sub(r"--slow \S+", "--slow 0s", shlex.join(words)).replace("http://localhost:9190", s.admin)
        for number, pod in enumerate(s.sim.urls):
            line = line.replace(f"http://vllm-{number}:8000", pod)
            line = re.sub(rf"\bvllm-{number}(:8000)?\b", f"pod-{number}", line)
        elsewhere = [] if "--url" in words or "doctor" in words else ["--url", s.admin]
        good(words, await asyncio.to_thread(run, [*shlex.split(line), *elsewhere]))


@asynccontextmanager
async def used_stack() -> AsyncIterator[Stack]:
    """A fleet whose latest decision has the id that pages show, and which tries a profile beside the one it uses."""
    shadow = {"name": "random", "shadow": True, "plugins": [{"pluginRef": "queue-scorer"}]}
    live = {"name": "default", "plugins": [{"pluginRef": name} for name in ("queue-scorer", "prefix-cache-scorer")]}
    plugins = [{"type": "queue-scorer"}, {"type": "prefix-cache-scorer"}, {"type": "max-score-picker"}]
    scheduling = {"plugins": plugins, "schedulingProfiles": [live, shadow]}
    settings = {"telemetry": {"decisions": {"slow": "1ms"}}, "scheduling": scheduling}
    async with stack(2, settings=settings) as s:
        shown = [words[words.index("--id") + 1] for words in named({"explain"}) if "--id" in words]
        for name in shown:
            await s.post("/v1/chat/completions", CHAT, {"x-request-id": name})
        yield s


def test_every_language_of_a_block_is_tested() -> None:
    found = {fence for page in PAGES for fence in re.findall(r"^ *```+(\w*)$", page.read_text(), re.MULTILINE)}
    assert found - {""} <= LANGUAGES
    for page in PAGES:
        fences = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)
        assert all(fences[::2]), f"{page.name}: a block has no language"
        assert not any(fences[1::2]), f"{page.name}: a block is not closed"


def test_every_line_of_a_shell_block_is_tested() -> None:
    first = {words[0].rpartition("/")[2] for words in WORDS if not words[0].startswith("#")}
    assert first <= {"kvlane", "curl", "make", "python", "git", "kubectl", "ssh"}
    assert all(words[1].startswith("bench/") for words in WORDS if words[0] == "python")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_has_the_documented_options(script: str) -> None:
    shown = {word.partition("=")[0] for words in WORDS if words[1:2] == [script] for word in words if word[:2] == "--"}
    helped = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert helped.returncode == 0, helped.stderr
    assert not {option for option in shown if not re.search(rf"{option}\b", helped.stdout)}


def test_manifests_for_kubectl_exist() -> None:
    folders = [words[words.index("-k") + 1] for words in WORDS if words[0] == "kubectl" and "-k" in words]
    assert folders
    assert all((ROOT / folder / "kustomization.yaml").exists() for folder in folders)


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_blocks_are_valid(block: Block) -> None:
    json.loads(block.text)


def test_every_named_extra_can_be_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(everywhere(r"kvlane\[([a-z,]+)\]"))
    assert named
    assert {extra for names in named for extra in names.split(",")} <= set(extras)


def test_every_named_compose_profile_exists() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"].values()
    profiles = {name for service in services for name in service.get("profiles", [])}
    assert set(everywhere(r"docker compose --profile (\w+)")) <= profiles


def test_every_named_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in everywhere(r"`make ([a-z][a-z-]*)"))


def test_the_documented_connector_is_the_source() -> None:
    shown = {block.text for block in blocks("python") if "(Connector)" in block.text}
    source = (ROOT / "proxy" / "disagg" / "connectors" / "nixl.py").read_text()
    assert len(shown) == 1
    assert [line for line in shown.pop().splitlines() if line not in source.splitlines()] == []


def everywhere(pattern: str) -> Iterator[str]:
    return (found for page in PAGES for found in re.findall(pattern, page.read_text()))
