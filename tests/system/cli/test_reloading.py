"""`kvlane serve` takes its file again: on SIGHUP, and by itself where it watches."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.cli.kvlane import Kvlane, ask, kvlane, until_ready
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until


@dataclass(frozen=True)
class Serving:
    process: Kvlane
    admin: str

    def shown(self) -> Any:
        return json.loads(ask(self.admin + "/admin/config")[1])

    def attempts(self) -> int:
        value: int = self.shown()["reliability"]["retries"]["attempts"]["value"]
        return value


def written(attempts: Any) -> str:
    given = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "pods": {"static": [{"url": "http://127.0.0.1:1"}]},
        "reliability": {"retries": {"attempts": attempts}, "drain": {"settle": 0}},
    }
    return yaml.safe_dump(given)


@contextmanager
def serving(file: Path, *options: str) -> Iterator[Serving]:
    admin = free_port()
    with kvlane("serve", "-c", str(file), "--admin-port", str(admin), *options) as process:
        it = Serving(process, f"http://127.0.0.1:{admin}")
        until_ready(it.admin + "/healthz", process)
        yield it
        process.signal(signal.SIGINT)
        assert process.ended() == 0
        assert "Traceback" not in process.errors


def test_sighup_reads_the_file_again_and_options_have_precedence(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(written(2))
    with serving(file) as it:
        file.write_text(written(5) + "admin: {port: 1}\n")
        it.process.signal(signal.SIGHUP)
        wait_until(lambda: it.attempts() == 5)
        version = it.shown()["version"]
        assert (version["number"], version["origin"], version["needsRestart"]) == (2, "SIGHUP", [])


def test_a_faulty_or_missing_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(written(2))
    with serving(file) as it:
        file.write_text(written(0) + "listn: {}\n")
        it.process.signal(signal.SIGHUP)
        refused = b'kvlane_config_reloads_total{result="refused"} %d.0'
        wait_until(lambda: refused % 1 in ask(it.admin + "/metrics")[1])
        file.unlink()
        it.process.signal(signal.SIGHUP)
        wait_until(lambda: refused % 2 in ask(it.admin + "/metrics")[1])
        assert it.attempts() == 2
    assert "reliability.retries.attempts: must be at least 1" in it.process.errors
    assert "unknown field 'listn'; did you mean 'listen'?" in it.process.errors


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_changed_config_map_is_applied_with_watch(tmp_path: Path, workers: str) -> None:
    """Kubernetes mounts a file as a link by way of a folder, and turns the link of the folder around."""
    for name, attempts in (("..v1", 2), ("..v2", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kvlane.yaml").write_text(written(attempts))
    (tmp_path / "..data").symlink_to("..v1")
    file = tmp_path / "kvlane.yaml"
    file.symlink_to("..data/kvlane.yaml")
    with serving(file, "--watch", "--workers", workers) as it:
        assert it.attempts() == 2
        (tmp_path / "..tmp").symlink_to("..v2")
        os.replace(tmp_path / "..tmp", tmp_path / "..data")
        wait_until(lambda: it.attempts() == 6)
        assert it.shown()["version"]["origin"] == "watch"


def test_a_changed_file_is_not_applied_without_watch(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(written(2))
    with serving(file) as it, serving(file, "--watch") as other:
        file.write_text(written(6))
        wait_until(lambda: other.attempts() == 6)
        assert it.attempts() == 2


POLICY = """
autoscale:
  pools:
    default:
      roles: [{name: vllm, min: 1, max: 2, metrics: [{name: queue_depth, kind: avg, target: 4}]}]
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigusr1_pauses_all_scaling(tmp_path: Path, workers: str) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(written(2) + POLICY)
    with serving(file, "--workers", workers) as it:

        def is_paused() -> Any:
            return json.loads(ask(it.admin + "/autoscale/pools/default")[1]).get("paused")

        wait_until(lambda: is_paused() is False)
        it.process.signal(signal.SIGUSR1)
        wait_until(lambda: is_paused() is True)
