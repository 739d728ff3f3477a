"""Programs that run beside the tests, each in a process group of its own that ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PATIENCE = 20.0
"""Seconds that a program has to stop by itself."""

LAST_CHILDREN = 15.0
"""Seconds for its children after it, who release its shared memory; if it was killed they take ten."""


class Program:
    """`with Program(...)`: it runs inside, and afterwards nothing of it does."""

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environ = {**os.environ, **(environ or {})}
        self._log = log

    def __enter__(self) -> Program:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Raises RuntimeError with the end of the log if the program dies or is not ready in time."""
        deadline = time.monotonic() + seconds
        while not ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._name} ended with {self._process.returncode}:\n{self.log[-4000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._name} was not ready after {seconds:g} s:\n{self.log[-4000:]}")
            time.sleep(0.1)

    def terminate(self) -> None:
        """Ask it to stop, without waiting."""
        self._process.terminate()

    def kill(self) -> None:
        """Without warning. Its children may clear up."""
        self._process.kill()
        self._signal_group(signal.SIGTERM)

    def signal_workers(self, number: int, named: bytes = b"") -> int:
        """To all that it has started, or to those with this in their names, but not to itself; how many that were."""
        workers = [pid for pid, state, group in _processes() if self._is_worker(pid, state, group, named)]
        for pid in workers:
            os.kill(pid, number)
        return len(workers)

    def stop(self) -> int:
        """Its exit status; negative is the signal that ended it."""
        self.terminate()
        return self.ended()

    def ended(self) -> int:
        """The exit status of a stopped program."""
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._end_group()
        return status

    def _end_group(self) -> None:
        deadline = time.monotonic() + LAST_CHILDREN
        while self._runs() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._signal_group(signal.SIGKILL)

    def _runs(self) -> bool:
        """Whether anybody in the group does; who is dead and has not been buried does not."""
        return any(group == self._process.pid and state != "Z" for _, state, group in _processes())

    def _is_worker(self, pid: int, state: str, group: int, named: bytes) -> bool:
        if group != self._process.pid or pid == self._process.pid or state == "Z":
            return False
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"resource_tracker" not in command and named in command

    @property
    def _name(self) -> str:
        return " ".join(self._command[:4])

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _processes() -> Iterator[tuple[int, str, int]]:
    """Number, state and group of every process there is."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            yield int(path.parent.name), state, int(group)
