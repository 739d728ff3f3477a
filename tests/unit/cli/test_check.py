"""What `kvlane check` refuses, as `kvlane serve` does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli import main


def test_a_second_file_is_refused_instead_of_replacing_the_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", "-c", str(tmp_path / "a.yaml"), "-c", str(tmp_path / "b.yaml")])
    assert result.exit_code == 2
    assert "give one file, not 2; files are not merged" in result.output


def test_a_missing_extra_of_the_replicas_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    file = tmp_path / "kvlane.yaml"
    file.write_text("pods: {static: [{url: http://a:1}]}\nreplicas: {store: redis://a:6379}\n")
    result = CliRunner().invoke(main, ["check", "-c", str(file)])
    assert result.exit_code == 2
    assert f"replicas.store: needs the extra: {sys.executable} -m pip install 'kvlane[redis]'" in result.output
