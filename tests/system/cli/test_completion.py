"""Shells complete what there is, by asking the command itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli import COMMANDS, main
from tests.helpers.cli.kvlane import ROOT
from tests.helpers.scenarios.stack import stack


def script(shell: str) -> str:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid_in_the_shell(shell: str) -> None:
    assert "_KVLANE_COMPLETE" in script(shell)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    checked = subprocess.run([shell, "-n"], input=script(shell), text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_an_unknown_shell_is_refused() -> None:
    result = CliRunner().invoke(main, ["completion", "csh"])
    assert result.exit_code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in result.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvlane ", set(COMMANDS)),
        ("kvlane do", {"doctor"}),
        ("kvlane import ", {"vllm-router", "sglang-router", "production-stack", "endpoint-picker", "litellm"}),
        ("kvlane serve --w", {"--watch", "--workers"}),
        ("kvlane completion ", {"bash", "zsh", "fish"}),
        ("kvlane plugins queue-", {"queue-scorer"}),
        ("kvlane drain --url http://127.0.0.1:1 ", set()),
    ],
)
def test_commands_options_and_values_are_offered(words: str, offered: set[str]) -> None:
    assert {value for _, value in completions(words)} == offered


@pytest.mark.parametrize(
    "words", ["kvlane check -c ", "kvlane explain --state ", "kvlane explain ", "kvlane import production-stack "]
)
def test_files_are_left_to_the_shell(words: str) -> None:
    assert completions(words) == [("file", "")]


async def test_pods_come_from_the_running_proxy() -> None:
    async with stack(3) as s:
        async with s.http.post(f"{s.admin}/admin/pods/pod-1/drain"):
            pass

        async def pods(words: str) -> list[str]:
            return sorted(value for _, value in await asyncio.to_thread(completions, words.replace("URL", s.admin)))

        assert await pods("kvlane drain --url URL ") == ["pod-0", "pod-2"]
        assert await pods("kvlane drain --url URL pod-0 ") == ["pod-2"], "no pod is drained twice"
        assert await pods("kvlane undrain --url URL ") == ["pod-1"]
        assert await pods("kvlane explain --url URL --pod ") == ["pod-0", "pod-1", "pod-2"]


async def test_the_key_of_the_port_is_used() -> None:
    async with stack(1, settings={"admin": {"port": 0, "apiKey": "secret"}}) as s:
        assert await asyncio.to_thread(completions, f"kvlane drain --url {s.admin} ") == []
        with_key = await asyncio.to_thread(completions, f"kvlane drain --url {s.admin} ", KVLANE_ADMIN_KEY="secret")
        assert with_key == [("plain", "pod-0")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvlane drain 10.0.0.7:80", ["8000", "8001"]),
        ("kvlane drain 10.0", ["10.0.0.7:8000", "10.0.0.7:8001"]),
        ("kvlane explain --pod=10.0.0.7:", ["8000", "8001"]),
        ("kvlane drain ", ["10.0.0.7:8000", "10.0.0.7:8001"]),
    ],
)
def test_bash_gets_completions_after_a_colon(line: str, offered: list[str], tmp_path: Path) -> None:
    """Of names like HOST:PORT. Record its questions, and respond here."""
    kvlane = tmp_path / "kvlane"
    reply = "plain,10.0.0.7:8000\nplain,10.0.0.7:8001"
    kvlane.write_text(f"#!/bin/sh\necho \"$COMP_WORDS|$COMP_CWORD\" > {tmp_path}/asked\nprintf '{reply}\\n'\n")
    kvlane.chmod(0o755)
    code = f"""{script("bash")}
COMP_LINE='{line}' COMP_POINT={len(line)} COMPREPLY=()
_kvlane_completion {kvlane}; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "--norc"], input=code, text=True, capture_output=True, check=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")
    assert (tmp_path / "asked").read_text() == f"{line}|{len(line.split(' ')) - 1}\n"


def completions(words: str, **environ: str) -> list[tuple[str, str]]:
    """Kind and value of all that is offered."""
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_KVLANE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        **environ,
    }
    code = "from proxy.cli import main; main(prog_name='kvlane')"
    done = subprocess.run([sys.executable, "-c", code], env=variables, text=True, capture_output=True, check=True)
    return [(kind, value) for kind, _, value in (line.partition(",") for line in done.stdout.split())]
