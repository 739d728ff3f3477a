"""The command `kvlane` as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[3]


class Kvlane:
    """A running command; `errors` is what it wrote there, once it has ended."""

    def __init__(self, *arguments: str, cwd: Path | None = None, ulimit: str = "", **environ: str) -> None:
        """`ulimit`: options of the shell's command of this name, which limit the process."""
        limited = ["sh", "-c", f'ulimit {ulimit} && exec "$@"', "sh"] if ulimit else []
        self._process = subprocess.Popen(
            [*limited, sys.executable, "-m", "proxy", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output = ""
        self.errors = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def ended(self, seconds: float = PATIENCE) -> int:
        """Waits for the end; the exit code."""
        output, errors = self._process.communicate(timeout=seconds)
        self.output += output
        self.errors += errors
        return self._process.returncode

    def kill(self) -> None:
        if self.running:
            self._process.kill()
            self.ended()


@contextmanager
def kvlane(*arguments: str, cwd: Path | None = None, ulimit: str = "", **environ: str) -> Iterator[Kvlane]:
    process = Kvlane(*arguments, cwd=cwd, ulimit=ulimit, **environ)
    try:
        yield process
    finally:
        process.kill()
        sys.stderr.write(process.errors)  # shown where a test fails


def ask(url: str, body: Any = None) -> tuple[int, bytes]:
    """Return status and body; status 0 while the port is closed."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""


def until_ready(url: str, process: Kvlane, seconds: float = PATIENCE) -> None:
    """Wait until the URL responds with 200."""
    end = time.monotonic() + seconds
    while ask(url)[0] != 200:
        assert process.running, process.ended() or process.errors
        assert time.monotonic() < end, f"{url} does not respond"
        time.sleep(0.05)
