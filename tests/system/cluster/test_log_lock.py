"""Whole lines from several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from proxy.cluster.workers import LockedWriter
write = LockedWriter(int(sys.argv[1]), 1)
line = sys.argv[2] * 997 + "\\n"
for _ in range(20):
    assert write((line * 20).encode()) == 20 * len(line)
"""


def test_batches_longer_than_a_pipe_buffer_do_not_mix(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(lock), sign], stdout=writer, pass_fds=[lock])
        for sign in "abc"
    ]
    os.close(writer)
    os.close(lock)
    with os.fdopen(reader, "rb") as stream:
        lines = stream.read().splitlines()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(lines) == 3 * 20 * 20
    assert {bytes(set(line)) for line in lines} == {b"a", b"b", b"c"}
    assert {len(line) for line in lines} == {997}
