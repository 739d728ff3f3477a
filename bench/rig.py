"""What benchmarks with real sockets stand on: mock engines, programs under test, load, and an end to all of them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import aiohttp

HERE = Path(__file__).resolve().parent
PATH = "/v1/chat/completions"
WORDS = "the router sends each request to the pod where its prefix is warm and its queue short so that tokens come soon"
EVENTS = 64
"""Of a stream, unless the body asks for another number."""

READY_SECONDS = 60.0


@dataclass(frozen=True)
class Site:
    """Where a program is put: a folder for its files, its port, a spare one for its metrics, the ports of the pods."""

    folder: Path
    port: int
    spare: int
    pods: tuple[int, ...]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.pods]

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)


@dataclass
class Outcome:
    """Seconds to first token and tokens, over all rounds of a variant."""

    ttft: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    failed: int = 0
    cut: int = 0
    """Requests that ended with their proxy."""

    def add(self, ttft: float, usage: Mapping[str, Any]) -> None:
        self.ttft.append(ttft)
        self.prompt += usage["prompt_tokens"]
        self.cached += usage["prompt_tokens_details"]["cached_tokens"]

    def row(self) -> dict[str, float]:
        deciles = statistics.quantiles(self.ttft, n=10)
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "hit rate": round(self.cached / max(1, self.prompt), 3),
            "ttft mean": round(statistics.mean(self.ttft), 4),
            "ttft p50": round(deciles[4], 4),
            "ttft p90": round(deciles[8], 4),
        }


@dataclass(frozen=True)
class Program:
    """Something that relays `/v1/chat/completions` of model "m" to pods; `command` may write files into the site."""

    name: str
    command: Callable[[Site], list[str]]
    version: str = ""
    folder: Path = HERE


@dataclass
class Running:
    """A process group of ours, known by the id of its first process."""

    name: str
    site: Site
    process: subprocess.Popen[bytes]

    def cpu_seconds(self) -> float:
        """User and system time that the living processes of the tree have spent."""
        ticks = 0
        for pid in _tree(self.process.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_kib(self) -> int:
        """Resident memory of the tree; pages that processes share count for each of them."""
        total = 0
        for pid in _tree(self.process.pid):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        return total

    def trim_log(self) -> None:
        os.truncate(self.site.folder / "log", 0)

    def stop(self) -> None:
        for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)


@dataclass(frozen=True)
class Engines:
    """The mock engines of one measurement; they count what reaches them, whatever the proxy reports."""

    ports: tuple[int, ...]

    def count(self) -> dict[str, int]:
        """`requests` and `events` so far, `streaming` at this moment."""
        counted: dict[str, int] = json.loads(fetched(self.ports[0], "/count"))
        return counted


@dataclass(frozen=True)
class Load:
    """What wrk saw: requests, failures of any kind, latencies in microseconds by percentile."""

    requests: int
    failures: dict[str, int]
    latency: dict[str, float]

    @property
    def failed(self) -> int:
        return sum(self.failures.values())


@dataclass
class Rig:
    """`with Rig() as rig`: everything started inside is gone afterwards, also after Ctrl-C and SIGTERM."""

    proxy_cores: str = "0"
    load_cores: str = "1"
    folder: Path = field(init=False)
    _processes: list[Running] = field(default_factory=list)

    def __enter__(self) -> Rig:
        missing = [tool for tool in ("gcc", "wrk", "taskset", "setpriv") if shutil.which(tool) is None]
        if missing:
            sys.exit(f"not found: {', '.join(missing)}; on Debian: apt-get install gcc libc6-dev wrk util-linux")
        if not {*map(int, (self.proxy_cores + "," + self.load_cores).split(","))} <= os.sched_getaffinity(0):
            sys.exit("these cores are not there; choose others with --proxy-cores and --load-cores")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self.folder = Path(tempfile.mkdtemp(prefix="kvlane-bench-"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for running in reversed(self._processes):
            running.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def engines(self, pods: int = 4, kv_blocks: int = 20000) -> Engines:
        """`kv_blocks` of 16 tokens each is what a pod says that it has."""
        binary = self.folder / "mockengine"
        if not binary.exists():
            subprocess.run(["gcc", "-O2", "-o", str(binary), str(HERE / "mockengine.c")], check=True)
        command = [str(binary), "-n", str(pods), "-b", str(kv_blocks)]
        running = self._start("engines", command, self.load_cores, Site(self.folder, 0, 0, ()), subprocess.PIPE)
        assert running.process.stdout is not None
        return Engines(tuple(int(port) for port in running.process.stdout.readline().split()))

    def start(self, program: Program, engines: Engines) -> Running:
        """Return when it responds to a request."""
        folder = self.folder / program.name
        folder.mkdir()
        port, spare = free_ports(2)
        site = Site(folder, port, spare, engines.ports)
        command = program.command(site)
        with (folder / "log").open("ab") as log:
            running = self._start(program.name, command, self.proxy_cores, site, log, program.folder)
        until = time.monotonic() + READY_SECONDS
        while not _responds(site.port):
            if running.process.poll() is not None or time.monotonic() > until:
                tail = (folder / "log").read_text(errors="replace")[-2000:]
                sys.exit(f"{program.name} does not serve: {' '.join(command)}\n{tail}")
            time.sleep(0.1)
        return running

    def wrk(self, port: int, script: str, connections: int, seconds: float) -> Callable[[], Load]:
        """Starts the load on the path of chat completions; the result waits for its end."""
        path = self.folder / "load.lua"
        path.write_text(script + REPORT)
        duration = str(max(1, round(seconds)))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{duration}s", "--timeout", "30s", "-s", str(path)]
        command.append(f"http://127.0.0.1:{port}{PATH}")
        running = self._start("wrk", command, self.load_cores, Site(self.folder, port, 0, ()), subprocess.PIPE)

        def result() -> Load:
            out = running.process.communicate(timeout=seconds + 60)[0].decode()
            self._processes.remove(running)
            if "REPORT " not in out:
                sys.exit(f"wrk did not finish:\n{out}")
            return Load(**json.loads(out.rpartition("REPORT ")[2]))

        return result

    def _start(self, name: str, command: list[str], cores: str, site: Site, out: Any, folder: Path = HERE) -> Running:
        process = subprocess.Popen(
            # the signal is for the case that this process is killed and cannot clean up
            ["setpriv", "--pdeathsig", "TERM", "taskset", "-c", cores, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=None if out is subprocess.PIPE else subprocess.STDOUT,
            start_new_session=True,
            cwd=folder,
        )
        running = Running(name, site, process)
        self._processes.append(running)
        return running


REPORT = """
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('REPORT {"requests":%d,', summary.requests))
  io.write(string.format('"failures":{"connect":%d,"read":%d,"write":%d,"timeout":%d,"status":%d},',
    e.connect, e.read, e.write, e.timeout, e.status))
  io.write(string.format('"latency":{"p50":%d,"p90":%d,"p99":%d,"p99.9":%d}}',
    latency:percentile(50), latency:percentile(90), latency:percentile(99), latency:percentile(99.9)))
end
"""


def chat(prompt: str, *, stream: bool = False, events: int = EVENTS, interval_us: int = 0) -> bytes:
    """A body; the mock engines take the interval of the events from `seed`, which every router passes on."""
    body: dict[str, Any] = {"model": "m"}
    body["messages"] = [{"role": "system", "content": prompt}, {"role": "user", "content": "hello"}]
    body |= {"max_tokens": events, "stream": stream, "seed": interval_us}
    return json.dumps(body, separators=(",", ":")).encode()


def prose(size: int) -> str:
    """`size` characters of words, the same ones in every run."""
    draw = Random(1)
    return " ".join(draw.choices(WORDS.split(), k=size))[:size]


def post_script(body: bytes) -> str:
    """For wrk: the same body over and over."""
    return f'wrk.method="POST"\nwrk.headers["Content-Type"]="application/json"\nwrk.body=[==[{body.decode()}]==]\n'


def ask(port: int, body: bytes) -> bytes:
    """The body of the response; exit if the response is invalid, or a stream does not end as it should."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    if response.status != 200:
        sys.exit(f"port {port} answered {response.status}: {content[:500].decode(errors='replace')}")
    sent = json.loads(body)
    good = content.count(b"data: ") == sent["max_tokens"] + 1 and content.endswith(b"data: [DONE]\n\n")
    if not (good if sent["stream"] else b'"choices"' in content):
        sys.exit(f"port {port} responded 200 with an unexpected body: {content[-500:].decode(errors='replace')}")
    return content


def fetched(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


async def healthy(urls: list[str]) -> None:
    """Return when each of them responds to /health."""
    async with aiohttp.ClientSession(raise_for_status=True) as session, asyncio.timeout(30):
        for url in urls:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/health"):
                        break
                await asyncio.sleep(0.1)


def free_ports(count: int) -> list[int]:
    """Held together while they are chosen, so that all are different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for held in sockets:
            held.bind(("127.0.0.1", 0))
        return [held.getsockname()[1] for held in sockets]


def table(rows: list[list[str]]) -> str:
    """Columns as wide as they must be, the first to the left and the others to the right."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def tables(parts: Mapping[str, Mapping[str, Mapping[str, object]]]) -> str:
    """One for each part: of rows by their names, of values by their heads."""
    shown = []
    for part, rows in parts.items():
        heads = list(next(iter(rows.values())))
        values = [[name, *(str(row[head]) for head in heads)] for name, row in rows.items()]
        shown.append(table([[part, *heads], *values]))
    return "\n\n".join(shown)


def say(text: str) -> None:
    """Progress, apart from the result."""
    print(text, file=sys.stderr, flush=True)


def _responds(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.request("POST", PATH, chat("hello"), {"Content-Type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _tree(pid: int) -> list[int]:
    pids = [pid]
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                pids += _tree(int(child))
    return pids
