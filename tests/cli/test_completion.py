"""Shells complete what there is, by asking the command itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from proxy.cli import COMMANDS, main
from tests.cli.kvlane import ROOT


def script(shell: str) -> str:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_takes(shell: str) -> None:
    assert "_KVLANE_COMPLETE" in script(shell)
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    checked = subprocess.run([shell, "-n"], input=script(shell), text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_shell_that_is_not_known_is_refused() -> None:
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
    ],
)
def test_commands_options_and_values_are_offered(words: str, offered: set[str]) -> None:
    asked = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "_KVLANE_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    code = "from proxy.cli import main; main(prog_name='kvlane')"
    told = subprocess.run([sys.executable, "-c", code], env=asked, text=True, capture_output=True, check=True)
    assert {line.partition(",")[2] for line in told.stdout.splitlines()} == offered
