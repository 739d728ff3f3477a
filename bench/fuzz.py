"""Send bytes to every place where they come in, and look for crashes, hangs, exceptions in the log and wrong grants.

    python bench/fuzz.py --seconds 600
    python bench/fuzz.py --seconds 600 --seed 7 responses multipart

    requests   bytes at the data port
    responses  bytes of a pod in response to requests of all APIs
    multipart  forms: which model a key is checked against, and which one the engine's parser reads
    admin      bodies at the admin port
    yaml       text at the loader of the configuration
    discovery  files of pods and of API keys
    cluster    objects of a Kubernetes API server
    jwt        tokens, and documents with an issuer's keys
    gateway    messages of a gateway at the port for ext_proc
    messages   what other workers and other proxies say on the bus and over the store

Inputs are the files of `tests/corpus/<target>` and mutations of them; the seed that is printed repeats a run. An input
that fails is stored in that directory, so that the next run begins with it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.fuzzing import bus, files, forms, gateway, ports, tokens
from bench.fuzzing.inputs import CORPUS, LATE, Check, Mutator, seeded

STUCK = 60
"""Seconds after which one input counts as a hang that holds the event loop."""

HELD = 0.05
"""Seconds of CPU in one turn of the event loop that are reported."""

MOST_FAILURES = 10

ALONE, PAUSE = 2, 0.5
"""Further tries of an input that timed out, and the seconds before each."""


@dataclass(frozen=True)
class Target:
    """Where `errors_are_faults` is not set, a log line without an exception is the expected reaction to a bad input."""

    opened: Callable[[], AbstractAsyncContextManager[Check]]
    errors_are_faults: bool = True


TARGETS = {
    "requests": Target(ports.requests),
    "responses": Target(ports.responses),
    "multipart": Target(forms.multipart),
    "admin": Target(ports.admin),
    "yaml": Target(files.yaml),
    "discovery": Target(files.discovery, errors_are_faults=False),
    "cluster": Target(files.cluster, errors_are_faults=False),
    "jwt": Target(tokens.tokens, errors_are_faults=False),
    "gateway": Target(gateway.gateway),
    "messages": Target(bus.messages, errors_are_faults=False),
}


EXPECTED = "Envoy sends no bodies"
"""An error that a gateway causes by its configuration; it is logged for its operator."""


class Faults(logging.Handler):
    """Collects exceptions of the log and of the event loop."""

    def __init__(self, errors_are_faults: bool = True) -> None:
        super().__init__(logging.WARNING)
        self._errors_are_faults = errors_are_faults
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if EXPECTED in record.getMessage():
            return
        if record.exc_info or (self._errors_are_faults and record.levelno >= logging.ERROR):
            self.found.append(self.format(record))

    def of_the_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(repr(context))

    def collect(self) -> str:
        found, self.found = self.found, []
        return "\n".join(found)


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Measures the CPU time of each of its turns."""

    def __init__(self) -> None:
        self.turns = _Turns()
        super().__init__(self.turns)


class _Turns(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self._began = time.thread_time()
        self._longest = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._longest = max(self._longest, time.thread_time() - self._began)
        try:
            return super().select(timeout)
        finally:
            self._began = time.thread_time()

    def collect(self) -> float:
        """Return the longest turn since the last call, in seconds."""
        longest, self._longest = self._longest, 0.0
        return longest


@dataclass
class Found:
    """`failed` has the first input of each kind of failure; `held` is the longest turn of the event loop and its input;
    `grown` is in MiB of resident memory."""

    tried: int
    failed: list[tuple[bytes, str]]
    kinds: set[str] = field(default_factory=set)
    held: tuple[float, bytes] = (0.0, b"")
    grown: float = 0.0

    def add(self, data: bytes, wrong: str) -> None:
        """Failures are of one kind if their texts differ in numbers and addresses only."""
        kind = re.sub(r"0x[0-9a-f]+|\d+", "", wrong.splitlines()[-1])[-200:]
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.failed.append((data, wrong))


async def fuzz(name: str, seconds: float, seed: int, most: int = sys.maxsize) -> Found:
    """Try the corpus first, then mutations."""
    target, rng = TARGETS[name], random.Random(seed)
    mutator, faults = Mutator(name, rng), Faults(target.errors_are_faults)
    found, before = Found(0, []), _peak()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(faults.of_the_loop)
    setattr(loop, "getaddrinfo", _only_addresses(loop))  # noqa: B010  # no name leaves the machine
    turns = loop.turns if isinstance(loop, MeasuredLoop) else None
    logging.getLogger().addHandler(faults)
    end = loop.time() + seconds
    try:
        async with target.opened() as check:
            while found.tried < most and loop.time() < end and len(found.failed) < MOST_FAILURES:
                data = mutator.corpus[found.tried] if found.tried < len(mutator.corpus) else mutator.next()
                found.tried += 1
                wrong = await tried(check, data)
                if wrong := wrong or faults.collect():
                    found.add(data, wrong)
                if turns is not None:
                    held = turns.collect()
                    if found.tried > len(mutator.corpus):  # before that, modules are imported
                        found.held = max(found.held, (held, data))
    finally:
        logging.getLogger().removeHandler(faults)
    if left := faults.collect():
        found.add(b"", left)
    found.grown = _peak() - before
    return found


async def tried(check: Check, data: bytes) -> str:
    """Return what is wrong. A time-out counts if it repeats in each of ALONE further tries: a busy machine is slow too,
    and an input may have to wait for what the one before left behind."""
    for _ in range(ALONE):
        wrong = await _tried(check, data)
        if not wrong.startswith(LATE):
            return wrong
        await asyncio.sleep(PAUSE)
    return await _tried(check, data)


async def _tried(check: Check, data: bytes) -> str:
    try:
        with _alarm():
            return await check(data, seeded(data))
    except TimeoutError as error:
        return f"{LATE}{error}"
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        return f"{type(error).__name__}: {error}"


@contextmanager
def _alarm() -> Iterator[None]:
    """Raise in whatever code holds the event loop for too long."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, at: FrameType | None) -> None:
        raise RuntimeError(f"held the event loop for {STUCK} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(STUCK)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _only_addresses(loop: asyncio.AbstractEventLoop) -> Callable[..., Awaitable[list[object]]]:
    async def resolve(host: object, port: object, **how: int) -> list[object]:
        if host in ("127.0.0.1", "localhost", "::1"):
            return await loop.run_in_executor(None, lambda: list(socket.getaddrinfo(host, port, **how)))  # type: ignore[arg-type, call-overload]
        raise socket.gaierror("no names here")

    return resolve


def _stored(name: str, failed: Sequence[tuple[bytes, str]]) -> Iterator[tuple[str, str]]:
    for data, wrong in failed:
        path = CORPUS / name / f"found-{crc32(data):08x}"
        path.write_bytes(data)
        yield str(path), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[[], *TARGETS], help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 2**32
    bad = 0
    for name in arguments.targets or TARGETS:
        before = time.perf_counter()
        with asyncio.Runner(loop_factory=MeasuredLoop) as runner:
            found = runner.run(fuzz(name, arguments.seconds, seed))
        took = time.perf_counter() - before
        print(f"{name}: {found.tried} inputs in {took:.0f} s, seed {seed}: {len(found.failed)} failed", flush=True)
        held, data = found.held
        print(f"  peak memory grew by {found.grown:.0f} MiB, the longest turn took {1000 * held:.0f} ms of CPU")
        if held > HELD:
            print(f"  the input of that turn: {data[:200]!r}", flush=True)
        for path, wrong in _stored(name, found.failed):
            print(f"  {path}: {wrong!a}", flush=True)
        bad += len(found.failed)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
