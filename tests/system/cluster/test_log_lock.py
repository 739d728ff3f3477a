"""Whole lines from several processes."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from proxy.cluster.workers import write_locked
line = sys.argv[1] * 997 + "\\n"
for _ in range(20):
    assert write_locked(1, (line * 20).encode()) == 20 * len(line)
"""


def test_batches_longer_than_a_pipe_buffer_do_not_mix() -> None:
    reader, writer = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", PROGRAM, sign], stdout=writer) for sign in "abc"]
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        lines = stream.read().splitlines()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert len(lines) == 3 * 20 * 20
    assert {bytes(set(line)) for line in lines} == {b"a", b"b", b"c"}
    assert {len(line) for line in lines} == {997}
