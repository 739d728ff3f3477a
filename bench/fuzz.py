"""Throws bytes at the four places where they come in, and looks for crashes, hangs and exceptions in the log.

    python bench/fuzz.py --seconds 600 requests answers yaml admin

    requests   bytes at the data port
    answers    bytes of pods at the relay
    yaml       text at the loader of the configuration
    admin      bodies at the admin port

Inputs are the corpus of `tests/corpus`, mutated; the seed that is printed repeats a run. What fails is written to the
working directory, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from proxy import yaml_source
from proxy.app import App
from proxy.core.errors import ConfigError
from proxy.settings import from_mapping

ROOT = Path(__file__).parent.parent
CORPUS = ROOT / "tests" / "corpus"

PATIENCE = 5.0
"""Seconds after which one input counts as a hang."""

QUIET = 0.02

LONGEST = 64 * 1024
"""Bytes of an input."""

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
STREAMED = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

WORDS: tuple[bytes, ...] = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"\xff", b"\xc3\x28", b"%00", b"%2e"),
    *(b"transfer-encoding: chunked\r\n", b"content-length: 2\r\n", b"content-length: 99999999999999999999\r\n"),
    *(b"connection: close\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n", b"expect: 100-continue\r\n"),
    *(b"0\r\n\r\n", b"2\r\n{}\r\n", b"fffffffff\r\n", b"HTTP/1.1 ", b"HTTP/1.0 ", b"GET ", b"HEAD "),
    *(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 101 x\r\n\r\n", b"data: [DONE]\n\n", b'data: {"usage":{}}\n\n'),
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b'"\\ud800"', b"[" * 200, b"{" * 200, b'{"a":' * 200, b"9" * 400),
    *(b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"${HOME}", b"${X:-", b"? ", b"- ", b"---\n", b"|\n"),
)

Check = Callable[[bytes], Awaitable[str]]
"""What is wrong with how an input was taken; empty: nothing."""


class Mutator:
    def __init__(self, name: str, rng: random.Random) -> None:
        self._rng = rng
        self.corpus = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]

    def next(self) -> bytes:
        data = self._rng.choice(self.corpus)
        for _ in range(self._rng.randrange(6)):
            data = self._mutated(data)
        return data[:LONGEST]

    def _mutated(self, data: bytes) -> bytes:
        rng = self._rng
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 4, 16, 200)))
        kind = rng.randrange(6)
        if kind == 0:
            return data[:start] + data[end:]
        if kind == 1:
            return data[:start] + rng.choice(WORDS) + data[start:]
        if kind == 2:
            return data[:start] + rng.choice(WORDS) + data[end:]
        if kind == 3:
            return data[:end] + data[start:end] * rng.choice((1, 2, 50)) + data[end:]
        if kind == 4:
            return data[:start] + bytes([rng.randrange(256)]) + data[start + 1 :]
        other = rng.choice(self.corpus)
        return data[:start] + other[rng.randrange(len(other) + 1) :]


class Faults(logging.Handler):
    """Collects what the log says of exceptions, and what the loop does."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(self.format(record))

    def of_the_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self.found.append(repr(context))

    def take(self) -> str:
        found, self.found = self.found, []
        return "\n".join(found)


@asynccontextmanager
async def proxy_before(pod: asyncio.Server) -> AsyncIterator[App]:
    port = pod.sockets[0].getsockname()[1]
    settings = {
        "listen": {"host": "127.0.0.1", "port": 0, "headTimeout": "1s", "bodyTimeout": "1s"},
        "admin": {"port": 0},
        "pods": {"static": [{"url": f"http://127.0.0.1:{port}", "models": ["m"]}], "refresh": {"interval": "60s"}},
        "reliability": {
            "timeouts": {"firstByte": "1s", "idle": "1s", "request": "2s"},
            "retries": {"attempts": 1},
            "breaker": {"failures": 1_000_000, "panicPercent": 0},
        },
        "telemetry": {"accessLog": False},
    }
    async with App(from_mapping(settings)) as app:
        yield app


async def said(port: int, pieces: list[bytes], quiet: float = PATIENCE) -> bytes | None:
    """What comes back, until it is closed; None if it is not. After so many seconds in which nothing comes the sender
    says that there is no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0)
            with contextlib.suppress(TimeoutError):
                while data := await asyncio.wait_for(reader.read(65536), quiet):
                    answer += data
                return answer
            writer.write_eof()
            return answer + await reader.read()
    except TimeoutError:
        return None
    except (ConnectionError, OSError):
        return b""
    finally:
        writer.transport.abort()


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True) if start < end]


async def answer_well(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A pod that cannot make head or tail of a request hangs up."""
    try:
        while line := await reader.readuntil(b"\r\n\r\n"):
            for field in line.split(b"\r\n"):
                if field.lower().startswith(b"content-length:"):
                    await reader.readexactly(int(field[15:]))
            writer.write(GOOD)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def requests(rng: random.Random) -> AsyncIterator[Check]:
    async with await asyncio.start_server(answer_well, "127.0.0.1", 0) as pod, proxy_before(pod) as app:

        async def check(data: bytes) -> str:
            answer = await said(app.port, cut(data, rng), QUIET)
            if answer is None:
                return "the connection was not closed"
            if answer and not answer.startswith(b"HTTP/1.1 "):
                return f"answered {answer[:80]!r}"
            healthy = await said(app.port, [CHAT % (len(STREAMED), STREAMED)])
            if healthy is None or not healthy.startswith(b"HTTP/1.1 200 "):
                return f"the next request was answered {healthy!r}"
            return "requests are in flight that have ended" if app.ledger.in_flight else ""

        yield check


@asynccontextmanager
async def answers(rng: random.Random) -> AsyncIterator[Check]:
    answer = b""

    async def answer_badly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await reader.readexactly(len(STREAMED))
                for piece in cut(answer, rng):
                    writer.write(piece)
                    await asyncio.sleep(0)
            else:
                writer.write(GOOD)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(answer_badly, "127.0.0.1", 0) as pod, proxy_before(pod) as app:

        async def check(data: bytes) -> str:
            nonlocal answer
            answer = data
            passed = await said(app.port, [CHAT % (len(STREAMED), STREAMED)])
            if passed is None:
                return "the client was left waiting"
            if passed and not passed.startswith(b"HTTP/1.1 "):
                return f"passed on {passed[:80]!r}"
            return "requests are in flight that have ended" if app.ledger.in_flight else ""

        yield check


@asynccontextmanager
async def yaml(rng: random.Random) -> AsyncIterator[Check]:
    async def check(data: bytes) -> str:
        before = time.perf_counter()
        try:
            values = yaml_source.read(data.decode("utf-8", "replace"), "fuzz", {"X": "1"})
            if isinstance(values, dict):
                from_mapping(values)
        except ConfigError:
            pass
        took = time.perf_counter() - before
        return f"took {took:.1f} s" if took > PATIENCE else ""

    yield check


ADMIN = b"%b HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
OPERATIONS = (
    b"POST /admin/pods",
    b"POST /admin/config?dry_run=1",
    b"POST /admin/pods/x/drain",
    b"DELETE /admin/pods/x",
    b"GET /admin/pods",
)


@asynccontextmanager
async def admin(rng: random.Random) -> AsyncIterator[Check]:
    async with await asyncio.start_server(answer_well, "127.0.0.1", 0) as pod, proxy_before(pod) as app:

        async def check(data: bytes) -> str:
            operation = rng.choice(OPERATIONS)
            answer = await said(app.admin_port, [ADMIN % (operation, len(data), data)])
            for endpoint in app.fleet.endpoints:
                app.fleet.remove(endpoint.name)
            if answer is None:
                return f"{operation!r} was not answered"
            return "" if b" 500 " not in answer[:20] else f"{operation!r} was answered {answer!r}"

        yield check


TARGETS = {"requests": requests, "answers": answers, "yaml": yaml, "admin": admin}


async def fuzz(name: str, seconds: float, seed: int, most: int = sys.maxsize) -> tuple[int, list[tuple[bytes, str]]]:
    """How many inputs were tried, the corpus first, and what went wrong with which."""
    rng = random.Random(seed)
    mutator, faults, failed = Mutator(name, rng), Faults(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(faults.of_the_loop)
    setattr(loop, "getaddrinfo", _only_addresses(loop))  # noqa: B010  # no name leaves the machine
    logging.getLogger().addHandler(faults)
    tried, end = 0, loop.time() + seconds
    try:
        async with TARGETS[name](rng) as check:
            while tried < most and loop.time() < end and len(failed) < 10:
                data = mutator.corpus[tried] if tried < len(mutator.corpus) else mutator.next()
                tried += 1
                try:
                    wrong = await check(data)
                except Exception as error:  # noqa: BLE001  # that is what is looked for
                    wrong = f"{type(error).__name__}: {error}"
                if wrong := wrong or faults.take():
                    failed.append((data, wrong))
    finally:
        logging.getLogger().removeHandler(faults)
    if left := faults.take():
        failed.append((b"", left))
    return tried, failed


def _only_addresses(loop: asyncio.AbstractEventLoop) -> Callable[..., Awaitable[list[object]]]:
    async def look_up(host: object, port: object, **how: int) -> list[object]:
        if host in ("127.0.0.1", "localhost", "::1"):
            return await loop.run_in_executor(None, lambda: list(socket.getaddrinfo(host, port, **how)))  # type: ignore[arg-type, call-overload]
        raise socket.gaierror("no names here")

    return look_up


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=600.0, help="for each target")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % 2**32
    bad = 0
    for name in arguments.targets or TARGETS:
        before = time.perf_counter()
        tried, failed = asyncio.run(fuzz(name, arguments.seconds, seed))
        took = time.perf_counter() - before
        print(f"{name}: {tried} inputs in {took:.0f} s, seed {seed}: {len(failed)} failed", flush=True)
        for number, (data, wrong) in enumerate(failed):
            path = Path(f"fuzz-{name}-{number}.bin")
            path.write_bytes(data)
            print(f"  {path}: {wrong!a}", flush=True)
        bad += len(failed)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
