"""Every process of `kvlane serve` has its garbage collector tuned."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.cli.kvlane import ROOT, kvlane, until_ready
from tests.helpers.ports import free_port
from tests.helpers.waiting import wait_until

WITNESS = """
import gc, os, threading, time

def watch():
    while not gc.get_freeze_count():
        time.sleep(0.05)
    open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.frozen"), "w").close()

threading.Thread(target=watch, daemon=True).start()
"""


@pytest.mark.parametrize(("workers", "processes"), [(1, 1), (2, 3)])
def test_objects_from_the_start_are_excluded_from_collections(workers: int, processes: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    pod, data = free_port(), free_port()
    ports = ["--host", "127.0.0.1", "--port", str(data), "--admin-port", "0", "--workers", str(workers)]
    with (
        kvlane("sim", "--port", str(pod)),
        kvlane("serve", "--pod", f"http://127.0.0.1:{pod}", *ports, PYTHONPATH=f"{tmp_path}:{ROOT}") as process,
    ):
        until_ready(f"http://127.0.0.1:{data}/health", process)
        wait_until(lambda: len(list(tmp_path.glob("*.frozen"))) >= processes)
        process.signal(signal.SIGINT)
        assert process.ended() == 0
