"""What it costs to keep a fleet's metrics fresh: share of a core and effective interval for 8, 200 and 1000 pods.

    python bench/refresh.py [--pods 8 --pods 200 --pods 1000] [--json]

The pods are cheap local servers in a second process; each gives an exposition the size of a real vLLM engine's, 69 KB.
Measured is this process, which runs nothing but the refresh loops: its CPU time over a window of a few intervals, after
every pod has been contacted and the interval has settled. Takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy.core.ports import SystemClock
from proxy.fleet.dialects import DIALECTS
from proxy.fleet.runner import FleetRunner
from proxy.fleet.scrape import parse
from proxy.fleet.settings import PodSettings, PodSources
from proxy.fleet.store import Fleet
from proxy.http.upstream.pool import PooledFetcher

EXPOSITION_BYTES = 69_000
RESPONSE = b'{"object":"chat.completion","choices":[]}'
MODELS = b'{"object":"list","data":[{"id":"m","object":"model","created":0,"owned_by":"bench"}]}'


def exposition() -> bytes:
    """What an engine says, with its histograms between the few lines that matter: about 840 lines of 82 bytes."""
    labels = '{engine="0",model_name="m"}'
    config = ",".join(f'setting_{number}="None"' for number in range(40))
    head = [
        "process_start_time_seconds 1.79524518229e+09",
        f"vllm:num_requests_running{labels} 12.0",
        f"vllm:num_requests_waiting{labels} 8.0",
        f"vllm:kv_cache_usage_perc{labels} 0.4168297455968689",
        f"vllm:prefix_cache_queries_total{labels} 8104.0",
        f"vllm:prefix_cache_hits_total{labels} 256.0",
    ]
    tail = [
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""} 1.7952452975e+09',
        f'vllm:cache_config_info{{block_size="32",engine="0",num_gpu_blocks="512",{config}}} 1.0',
    ]
    filler = [
        f'vllm:some_latency_seconds_bucket{{engine="0",le="{bound}.0",model_name="m"}} 23.0' for bound in range(790)
    ]
    text = "\n".join([*head, *filler[:500], *tail, *filler[500:], ""])
    while len(text) < EXPOSITION_BYTES:
        text += "# HELP http_request_duration_seconds Latency with only few buckets by handler.\n"
    return text.encode()


class _Pod(asyncio.Protocol):
    """Respond to every request by its path, with minimal HTTP."""

    def __init__(self, responses: dict[bytes, bytes]) -> None:
        self._responses = responses

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for request in data.split(b"\r\n\r\n")[:-1]:
            self._transport.write(self._responses[request.split(b" ", 2)[1]])


async def serve(pods: int) -> None:
    """Opens a port per pod, prints them as JSON, and serves until it is ended."""
    responses = {
        path: b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        for path, body in (
            (b"/metrics", exposition()),
            (b"/v1/models", MODELS),
            (b"/v1/chat/completions", RESPONSE),
        )
    }
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Pod(responses), "127.0.0.1", 0) for _ in range(pods)]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


async def measure(pods: int) -> dict[str, float]:
    server = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", str(pods), stdout=asyncio.subprocess.PIPE, limit=1 << 20
    )
    try:
        assert server.stdout is not None
        ports = json.loads(await server.stdout.readline())
        return await _refresh(ports)
    finally:
        server.terminate()
        await server.wait()


async def _refresh(ports: list[int]) -> dict[str, float]:
    clock = SystemClock()
    settings = PodSources(static=tuple(PodSettings(url=f"http://127.0.0.1:{port}") for port in ports))
    fleet = Fleet(clock)
    async with (
        PooledFetcher(settings.refresh.timeout, clock) as fetcher,
        FleetRunner(fleet, settings, fetcher, clock, random.Random(1)) as runner,
    ):
        assert await runner.first_contact(60)
        interval = max(one.interval for one in map(runner.refresher_of, fleet.endpoints) if one)
        await asyncio.sleep(1.5 * interval)
        window = min(25.0, max(4.0, 2 * interval))
        charged, seen = runner.budget.charged, runner.budget.rounds
        cpu, began, rounds = time.process_time(), time.monotonic(), runner.budget.rounds
        await asyncio.sleep(window)
        cpu, elapsed, rounds = time.process_time() - cpu, time.monotonic() - began, runner.budget.rounds - rounds
        return {
            "pods": len(ports),
            "ready": len(fleet.ready),
            "core_percent": 100 * cpu / elapsed,
            "interval_ms": 1000 * len(ports) * elapsed / rounds,
            "us_per_refresh": 1e6 * cpu / rounds,
            "us_accounted": 1e6 * (runner.budget.charged - charged) / (runner.budget.rounds - seen),
        }


def parse_cost() -> float:
    """Microseconds to read one exposition, the best of several tries."""
    text, dialect = exposition(), DIALECTS["vllm"]
    parse(text, dialect)
    tries = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(50):
            parse(text, dialect)
        tries.append((time.perf_counter() - began) / 50)
    return 1e6 * min(tries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, action="append", help="size of a fleet; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    report(parse_cost(), [uvloop.run(measure(pods)) for pods in options.pods or [8, 200, 1000]], options.json)


def report(parse_us: float, rows: list[dict[str, float]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"exposition_bytes": len(exposition()), "parse_us": parse_us, "fleets": rows}))
        return
    print(f"exposition of {len(exposition())} bytes, read in {parse_us:.0f} us\n")
    print("pods  ready  % of a core  interval ms  us per refresh  us accounted")
    for row in rows:
        print(
            f"{row['pods']:4.0f}  {row['ready']:5.0f}  {row['core_percent']:11.2f}  {row['interval_ms']:11.0f}"
            f"  {row['us_per_refresh']:14.0f}  {row['us_accounted']:12.0f}"
        )


if __name__ == "__main__":
    main()
