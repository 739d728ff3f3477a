"""`kvlane demo`: one workload on simulated pods or ranks, with and without prefix-aware placement."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import statistics
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from proxy import outbound
from proxy.app import App
from proxy.core.tasks import Tasks
from proxy.settings import from_mapping
from proxy.tools.presets import picked_by

PODS = 4
KV_BLOCKS = 4096
"""KV blocks of a pod, of 16 tokens each: 65,000 tokens. All documents together have 144,000 tokens: they fit into the
fleet, but not into one pod."""
DOCUMENTS = 24
DOCUMENT_BYTES = 24_000
REQUESTS_PER_SECOND = 16.0
RESPONSE_TOKENS = 24
BAR_WIDTH = 10
"""Columns of the progress bar, so that its line fits into 80."""
WORDS = ("the", "pod", "holds", "a", "prefix", "in", "its", "cache", "so", "that", "first", "token", "comes", "soon")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two configurations of kvlane, by name: `scheduling`, and the settings of each simulated `pod`."""

    title: str
    place: str
    """Where requests go: to a pod, or to a rank of the only pod."""
    pods: int
    ranks: int
    settings: Mapping[str, Mapping[str, Any]]


def comparison_of(ranks: int) -> Comparison:
    """Return the comparison for several pods, or for the ranks of one pod. A pod that is one endpoint gets requests
    without a rank, so that its engine balances them."""
    if ranks == 1:
        settings = {"round robin": {"scheduling": picked_by("round-robin-picker")}, "prefix-aware": {}}
        return Comparison(f"{PODS} simulated pods", "pod", PODS, 1, settings)
    one_endpoint = {"pod": {"dataParallel": {"size": 1}}}
    title = f"One simulated pod of {ranks} data-parallel ranks"
    return Comparison(title, "rank", 1, ranks, {"the engine's balancer": one_endpoint, "kvlane": {}})


@dataclass(slots=True)
class DemoOutcome:
    """The results of one policy: seconds to the first token, tokens, and requests per pod or rank."""

    ttft: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pods: Counter[str] = field(default_factory=Counter)
    failed: int = 0

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def live(self) -> str:
        if not self.ttft:
            return ""
        ttft = statistics.median(self.ttft)
        return f"{len(self.ttft)} responses, TTFT p50 {ttft:.2f} s, hit rate {self.hit_rate:.0%}"

    def summary(self, place: str) -> dict[str, Any]:
        deciles = statistics.quantiles(self.ttft, n=10) if len(self.ttft) > 1 else [float("nan")] * 9
        served = sum(self.pods.values()) or 1
        return {
            "requests": len(self.ttft),
            "failed": self.failed,
            "ttft_p50_seconds": round(deciles[4], 3),
            "ttft_p90_seconds": round(deciles[8], 3),
            "hit_rate": round(self.hit_rate, 3),
            f"{place}_shares": {pod: round(count / served, 3) for pod, count in sorted(self.pods.items())},
        }


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(1, 120),
    default=15.0,
    show_default=True,
    help="Duration of each of the two runs.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Data-parallel ranks of one simulated pod; with more than 1, kvlane is compared with the engine's balancer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else.")
def demo(seconds: float, ranks: int, as_json: bool) -> None:
    """Compare the time to first token of prefix-aware routing and round robin. Four simulated pods get the same
    questions about shared documents, first by round robin, then prefix-aware.

    With --ranks 8 there is one simulated pod with eight data-parallel ranks behind one port. First the engine's own
    balancer chooses ranks by the length of their queues, then kvlane chooses the rank that has the document in its
    cache.
    """
    console = Console(quiet=as_json)
    comparison = comparison_of(ranks)
    with contextlib.suppress(KeyboardInterrupt):
        results = uvloop.run(_compare(comparison, seconds, console))
        if as_json:
            click.echo(orjson.dumps(results, option=orjson.OPT_INDENT_2))
        else:
            _show(console, comparison, results)


async def _compare(comparison: Comparison, seconds: float, console: Console) -> dict[str, dict[str, Any]]:
    console.print(
        f"{comparison.title}\n{DOCUMENTS} documents of {DOCUMENT_BYTES // 4000}k tokens; "
        f"{REQUESTS_PER_SECOND:g} questions a second, each about one of them\n"
    )
    results = {}
    with Progress(
        TextColumn("{task.description:>21}"), BarColumn(BAR_WIDTH), TextColumn("{task.fields[live]}"), console=console
    ) as bar:
        for policy, settings in comparison.settings.items():
            task = bar.add_task(policy, total=seconds, live="")

            def show(done: float, outcome: DemoOutcome, task: Any = task) -> None:
                bar.update(task, completed=done, live=outcome.live())

            async with _pods(comparison) as urls, _proxy(urls, settings) as url:
                outcome = await _ask(url, seconds, show)
                if comparison.ranks > 1:
                    outcome.pods = await _ranks_of(urls[0])
            results[policy] = outcome.summary(comparison.place)
    return results


@contextlib.asynccontextmanager
async def _pods(comparison: Comparison) -> AsyncIterator[list[str]]:
    """Run the pods in their own process, so that they do not compete with the proxy for the event loop."""
    port = _free_ports(comparison.pods)
    options = {"port": port, "pods": comparison.pods, "data-parallel-size": comparison.ranks, "gpu-blocks": KV_BLOCKS}
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "sim", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            if not await process.stdout.readline():  # it prints a line when all pods listen
                raise click.ClickException("the simulated pods did not start; their message is above")
        yield [f"http://127.0.0.1:{port + index}" for index in range(comparison.pods)]
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def _proxy(pods: list[str], own: Mapping[str, Any]) -> AsyncIterator[str]:
    static = [{"url": url, "name": f"pod-{index}", **own.get("pod", {})} for index, url in enumerate(pods)]
    settings = from_mapping(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "telemetry": {"accessLog": False, "logLevel": "error"},
            "pods": {"static": static},
            "scheduling": own.get("scheduling"),
        }
    )
    async with App(settings) as app:
        yield f"http://127.0.0.1:{app.port}"


async def _ask(url: str, seconds: float, show: Callable[[float, DemoOutcome], None]) -> DemoOutcome:
    """Send the same requests at the same moments for every policy."""
    rng = random.Random(7)
    documents = [" ".join(rng.choices(WORDS, k=DOCUMENT_BYTES // 5))[:DOCUMENT_BYTES] for _ in range(DOCUMENTS)]
    outcome = DemoOutcome()
    loop = asyncio.get_running_loop()
    start = loop.time()
    at = 0.0
    sent: list[asyncio.Task[None]] = []
    async with Tasks() as tasks, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (at := at + rng.expovariate(REQUESTS_PER_SECOND)) < seconds:
            body = _question(rng.choice(documents), rng.randrange(10**6))
            await asyncio.sleep(start + at - loop.time())
            sent.append(tasks.start(_send_question(session, url, body, outcome), "question"))
            show(at, outcome)
        await asyncio.wait(sent, timeout=30)
        show(seconds, outcome)
    return outcome


def _question(document: str, number: int) -> bytes:
    return orjson.dumps(
        {
            "model": "sim",
            "messages": [{"role": "system", "content": document}, {"role": "user", "content": f"Question {number}?"}],
            "max_tokens": RESPONSE_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def _ranks_of(pod: str) -> Counter[str]:
    records = orjson.loads((await outbound.fetch("GET", f"{pod}/admin/requests", 30.0)).body)
    return Counter(str(record["rank"]) for record in records if record["rank"] is not None)


async def _send_question(session: aiohttp.ClientSession, url: str, body: bytes, outcome: DemoOutcome) -> None:
    loop = asyncio.get_running_loop()
    sent = loop.time()
    headers = {"content-type": "application/json"}
    try:
        async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as response:
            response.raise_for_status()
            begun = await response.content.readany()
            first = loop.time() - sent
            usage = _usage(begun + await response.read())
    except aiohttp.ClientError:
        outcome.failed += 1
        return
    outcome.ttft.append(first)
    outcome.pods[response.headers["x-kvlane-endpoint"]] += 1
    outcome.prompt_tokens += usage["prompt_tokens"]
    outcome.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


def _usage(stream: bytes) -> dict[str, Any]:
    """Return the usage of a stream. Raise ClientPayloadError if its last event has none."""
    event = next((line for line in reversed(stream.splitlines()) if line.startswith(b"data: {")), b"data: {}")
    usage: dict[str, Any] | None = orjson.loads(event[6:]).get("usage")
    if usage is None:
        raise aiohttp.ClientPayloadError("the stream has no usage")
    return usage


def _show(console: Console, comparison: Comparison, results: dict[str, dict[str, Any]]) -> None:
    table = Table(Column(no_wrap=True), "TTFT p50", "TTFT p90", "prefix hits", f"share of each {comparison.place}")
    for policy, row in results.items():
        shares = "  ".join(f"{share:.0%}" for share in row[f"{comparison.place}_shares"].values())
        ttft = (f"{row[name]:.2f} s" for name in ("ttft_p50_seconds", "ttft_p90_seconds"))
        table.add_row(policy, *ttft, f"{row['hit_rate']:.0%}", shares)
    console.print("\n", table)
    console.print("\nTry it yourself, each line in its own terminal:\n", highlight=False)
    pods = " ".join(f"--pod http://127.0.0.1:{8101 + index}" for index in range(comparison.pods))
    kvlane = _kvlane()
    size = f"--data-parallel-size {comparison.ranks}" if comparison.ranks > 1 else f"--pods {comparison.pods}"
    console.print(f"  {kvlane} sim --port 8101 {size}\n  {kvlane} serve {pods}", highlight=False, soft_wrap=True)
    console.print("  # in a browser: http://localhost:9190/dashboard", highlight=False, markup=False)
    console.print(
        "  curl -N http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d "
        '\'{"model": "sim", "stream": true, "messages": [{"role": "user", "content": "Hello!"}]}\'',
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _kvlane() -> str:
    """Return the command as the user can type it: `make demo` installs into an environment that is not on the PATH."""
    installed = Path(sys.executable).with_name("kvlane")
    if shutil.which("kvlane") or not installed.exists():
        return "kvlane"
    return os.path.relpath(installed)


def _free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports, below the range of outgoing connections."""
    for _ in range(50):
        first = random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise click.ClickException(f"no {count} consecutive free ports on 127.0.0.1")
