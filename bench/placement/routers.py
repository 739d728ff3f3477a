"""Routers that serve over real sockets: kvlane with a configuration, and other programs."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import peers
from bench.placement.policies import DEFAULT, NAMED
from bench.rig import Program, Running, Site, free_ports

ROOT = Path(__file__).resolve().parent.parent.parent

READY_SECONDS = 60.0

SETTLE_SECONDS = 1.0
"""Between the first successful response and the first request: a router may know some pods earlier than others."""

PROGRAMS = {
    "round-robin": "nginx-round-robin",
    "random": "sglang-router-random",
    "least-requests": "haproxy",
    "power-of-two": "sglang-router-power-of-two",
    "cache-aware": "sglang-router",
}
"""Policy of the virtual mode -> the program that does it over sockets."""


class NoSuchRouter(ValueError):
    """What a policy chose on the virtual clock cannot be done over sockets."""


@dataclass(frozen=True, slots=True)
class Router:
    """One that serves. `metrics` is the URL of kvlane's own metrics, empty for others."""

    name: str
    version: str
    port: int
    metrics: str = ""
    given: Sequence[int] = ()
    """The pod of each request, which is sent there, and not to `port`."""


@dataclass(frozen=True, slots=True)
class Given:
    """A policy that no program has: the `pods` that it chose on the virtual clock, one for each request."""

    name: str
    pods: Sequence[int]


def is_program(policy: str) -> bool:
    """Or a configuration of kvlane."""
    return policy not in NAMED or policy in PROGRAMS


def program(policy: str, slower: float, venv: Path) -> Program:
    """A peer's name, a policy that some peer has, `default`, or the path of a kvlane configuration. Exits if a peer is
    not installed."""
    name = PROGRAMS.get(policy, policy)
    if name in peers.ALL:
        return peers.program(name, venv)
    config = "-" if policy == DEFAULT else str(Path(policy).resolve())
    return Program(policy, partial(_kvlane, config, slower), "this checkout", ROOT)


@contextmanager
def started(program: Program | Given, pods: Sequence[int], folder: Path) -> Iterator[Router]:
    """Serves when it is returned; exits with the end of its log if it does not start."""
    if isinstance(program, Given):
        yield Router(program.name, "decided on the virtual clock", 0, given=program.pods)
        return
    port, spare = free_ports(2)
    site = Site(folder, port, spare, tuple(pods))
    command = program.command(site)
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=program.folder
        )
    running = Running(program.name, site, process)
    try:
        _await_response(running, command)
        own = program.folder == ROOT
        yield Router(program.name, program.version, port, f"http://127.0.0.1:{spare}/metrics" if own else "")
    finally:
        running.stop()


def _kvlane(config: str, slower: float, site: Site) -> list[str]:
    command = [sys.executable, "-m", "bench.placement.slowed", f"{slower:g}", config]
    return [*command, str(site.port), str(site.spare), *site.urls]


def _await_response(running: Running, command: list[str]) -> None:
    until = time.monotonic() + READY_SECONDS
    while not _responds(running.site.port):
        if running.process.poll() is not None or time.monotonic() > until:
            tail = (running.site.folder / "log").read_text(errors="replace")[-2000:]
            sys.exit(f"{running.name} does not serve: {' '.join(command)}\n{tail}")
        time.sleep(0.1)
    time.sleep(SETTLE_SECONDS)


def _responds(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
