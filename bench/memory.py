"""Resident memory of a proxy: with thousands of slow streams, and with an hour of conversations in its prefix index.

    python bench/memory.py [--peers sglang-router] [--streams 5000] [--index-blocks 200000] [--trace FILE] [--json]

Streams: all are open at once, an event each a second, and each must arrive whole. Index: four pods whose KV caches hold
`--index-blocks` blocks of 64 tokens together are sent prompts as fast as they take them, until long after the index is
full: the prompts of a trace (JSON lines, or gzip of them, with `hash_ids`: an id for each block of 512 tokens), or
12,000 prompts of conversations that share 40 system prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import peers
from rig import PATH, Engines, Program, Rig, Running, chat, fetched, say, table

PODS = 4
BLOCK_TOKENS = 64
ENGINE_BLOCK_TOKENS = 16
STREAM_SECONDS = 20
"""From the first event of a stream to its last; opening all of them must take less."""

CLIENTS = 8
SYNTHETIC_PROMPTS = 12_000
TRACE_BLOCK_BYTES = 512 * 4


@dataclass(frozen=True)
class Streams:
    """`together` is how many the engines saw open at once; memory is in KiB, `rss_peak` while they were."""

    program: str
    streams: int
    served: int
    together: int
    rss_before: int
    rss_peak: int

    @property
    def kib_each(self) -> float:
        return (self.rss_peak - self.rss_before) / max(1, self.together)


@dataclass(frozen=True)
class Index:
    """`blocks` as the proxy counts them, None where it does not; memory in KiB, at each quarter of the prompts."""

    program: str
    prompts: int
    served: int
    blocks: int | None
    rss_before: int
    rss_quarters: list[int]


def main() -> None:
    options = _options()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * options.streams + 100:
        sys.exit(f"{options.streams} streams need twice as many open files: raise the hard limit (ulimit -Hn)")
    programs = peers.chosen(options)
    streams: list[Streams] = []
    indexes: list[Index] = []
    for program in programs:
        if options.streams:
            with Rig(options.proxy_cores, options.load_cores) as rig:
                streams.append(asyncio.run(_streams(rig, program, options.streams)))
        if options.index_blocks:
            with Rig(options.proxy_cores, options.load_cores) as rig:
                indexes.append(asyncio.run(_index(rig, program, options)))
    if options.json:
        print(json.dumps({"streams": [asdict(one) for one in streams], "index": [asdict(one) for one in indexes]}))
    else:
        print(_as_text(streams, indexes))
    if any(one.served < one.streams for one in streams) or any(one.served < one.prompts for one in indexes):
        sys.exit("not everything was served")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_options(parser)
    parser.add_argument("--streams", type=int, default=5000, help="0 leaves this part out")
    parser.add_argument("--index-blocks", type=int, default=200_000, help="of 64 tokens; 0 leaves this part out")
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids, gzip or not")
    return parser.parse_args()


async def _streams(rig: Rig, program: Program, count: int) -> Streams:
    engines = rig.engines(PODS)
    proxy = rig.start(program, engines)
    await asyncio.sleep(1)
    before = peak = proxy.rss_kib()
    together = 0
    body = chat("hello", stream=True, events=STREAM_SECONDS, interval_us=1_000_000)
    request = _request(proxy.site.port, body)
    async with asyncio.timeout(STREAM_SECONDS * 4):
        streams = asyncio.gather(*(_stream(proxy.site.port, request, index / count) for index in range(count)))
        while not streams.done():
            await asyncio.wait([streams], timeout=0.5)
            if (streaming := engines.count()["streaming"]) >= together:
                together, peak = streaming, max(peak, proxy.rss_kib())
        served = sum(streams.result())
    say(f"{program.name}: {served} of {count} streams served, {together} at once")
    return Streams(program.name, count, served, together, before, peak)


async def _stream(port: int, request: bytes, turn: float) -> bool:
    """`turn` from 0 to 1: when to begin, within the first quarter of a stream's life."""
    await asyncio.sleep(turn * STREAM_SECONDS / 4)
    loop = asyncio.get_running_loop()
    try:
        transport, reader = await loop.create_connection(lambda: StreamReader(loop), "127.0.0.1", port)
    except OSError:
        return False
    transport.write(request)
    try:
        return await reader.whole
    finally:
        transport.close()


class StreamReader(asyncio.Protocol):
    """Keeps nothing but the count of events and the last bytes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.whole: asyncio.Future[bool] = loop.create_future()
        self._events = 0
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        seen = self._tail + data
        self._events += seen.count(b"data: {") - self._tail.count(b"data: {")
        self._tail = seen[-40:]
        if self._tail.endswith(b"0\r\n\r\n") and not self.whole.done():
            self.whole.set_result(self._events == STREAM_SECONDS and b"data: [DONE]" in self._tail)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.whole.done():
            self.whole.set_result(False)


async def _index(rig: Rig, program: Program, options: argparse.Namespace) -> Index:
    engines = rig.engines(PODS, options.index_blocks * BLOCK_TOKENS // ENGINE_BLOCK_TOKENS // PODS)
    proxy = rig.start(program, engines)
    await asyncio.sleep(1)
    before, quarters, served = proxy.rss_kib(), [], 0
    prompts = _traced(options.trace) if options.trace else _conversations(SYNTHETIC_PROMPTS)
    for quarter in range(4):
        part = prompts[len(prompts) * quarter // 4 : len(prompts) * (quarter + 1) // 4]
        served += await _send(proxy, part)
        proxy.trim_log()
        quarters.append(proxy.rss_kib())
        say(f"{program.name}: {served} prompts, {quarters[-1] / 1024:.0f} MiB, {_blocks(proxy, engines)} blocks")
    return Index(program.name, len(prompts), served, _blocks(proxy, engines), before, quarters)


def _traced(path: Path) -> list[list[int]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def _conversations(count: int) -> list[list[int]]:
    """Prompts as ids of blocks: a shared system prompt of 4 blocks, then 1 to 5 more with every turn, up to 8 turns of
    200 conversations at a time."""
    draw = Random(1)
    fresh = iter(range(1_000_000, 1 << 40))
    running: list[list[int]] = []
    prompts = []
    for _ in range(count):
        if len(running) < 200:
            running.append([draw.randrange(40) * 4 + block for block in range(4)])
        conversation = draw.choice(running)
        conversation.extend(next(fresh) for _ in range(draw.randint(1, 5)))
        prompts.append(list(conversation))
        if draw.random() < 1 / 8:
            running.remove(conversation)
    return prompts


async def _send(proxy: Running, prompts: list[list[int]]) -> int:
    """The number of prompts with status 200."""
    left = iter(prompts)
    return sum(await asyncio.gather(*(_client(proxy.site.port, left) for _ in range(CLIENTS))))


async def _client(port: int, left: Iterator[list[int]]) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    served = 0
    try:
        for ids in left:
            writer.write(_request(port, chat("".join(map(_block, ids)))))
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            served += head.startswith(b"HTTP/1.1 200")
    except (OSError, EOFError) as error:
        say(f"a client stopped: {error}")
    finally:
        writer.close()
    return served


def _block(number: int) -> str:
    """A text of its own for every id, of 512 tokens."""
    return f"{number:07x} " * (TRACE_BLOCK_BYTES // 8)


def _request(port: int, body: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _blocks(proxy: Running, engines: Engines) -> int | None:
    """From kvlane's own metrics."""
    if not (proxy.site.folder / "kvlane.yaml").exists():
        return None
    series = re.search(rb"^\w*prefix_index_blocks ([\d.e+]+)", fetched(proxy.site.spare, "/metrics"), re.MULTILINE)
    return int(float(series[1])) if series else None


def _as_text(streams: list[Streams], indexes: list[Index]) -> str:
    parts = []
    if streams:
        rows = [["streams", "asked", "served", "at once", "MiB before", "MiB at peak", "KiB each"]]
        for one in streams:
            counts = [str(one.streams), str(one.served), str(one.together)]
            rows.append([one.program, *counts, _mib(one.rss_before), _mib(one.rss_peak), f"{one.kib_each:.1f}"])
        parts.append(table(rows))
    if indexes:
        rows = [["index", "prompts", "served", "blocks", "MiB before", "1/4", "2/4", "3/4", "all"]]
        for index in indexes:
            counts = [str(index.prompts), str(index.served), "-" if index.blocks is None else str(index.blocks)]
            rows.append([index.program, *counts, *map(_mib, [index.rss_before, *index.rss_quarters])])
        parts.append(table(rows))
    return "\n\n".join(parts)


def _mib(kib: int) -> str:
    return f"{kib / 1024:.1f}"


if __name__ == "__main__":
    main()
