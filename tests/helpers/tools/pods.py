"""A pod with faults that simulated pods do not have, and findings about pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from random import Random
from typing import Any

from aiohttp import web

from proxy.core.ports import SystemClock
from proxy.tools.findings import Finding, Level, PodReport, of_pod
from proxy.tools.probe import ProbeOptions, probe_pods

MANNER = ProbeOptions(timeout=2.0, idle=0.3, reaction_time=0.4)
METRICS = """\
vllm:num_requests_running{{model_name="m"}} {running}
vllm:num_requests_waiting{{model_name="m"}} 0
vllm:kv_cache_usage_perc{{model_name="m"}} 0.1
vllm:cache_config_info{{block_size="16",num_gpu_blocks="100",enable_prefix_caching="{caching}"}} 1.0
vllm:prefix_cache_queries_total{{model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{model_name="m"}} {hits}
"""


@dataclass
class FakePod:
    """Responds as vLLM does, except as its fields say."""

    caches: bool = True
    says_caching: bool = True
    aborts: bool = True
    completes: bool = True
    ahead: float = 0.0
    health: int = 200
    without: str = ""
    """What the lines of its exposition that are left out have in them."""
    replies: dict[str, Any] = field(default_factory=dict)
    """Further paths and the JSON of their responses."""
    texts: dict[str, str] = field(default_factory=dict)
    """Further paths and the text of their responses."""
    nixl: bool = False
    kv_params: dict[str, Any] | None = None
    """What a prompt that is for another pod leaves."""
    url: str = ""
    requested: list[str] = field(default_factory=list)
    running: int = 0
    prompts: list[str] = field(default_factory=list)
    hits: int = 0
    handed_over: int = 0

    async def reply(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(request.path)
        if request.path in self.replies:
            return web.json_response(self.replies[request.path])
        if request.path in self.texts:
            return web.Response(text=self.texts[request.path])
        if request.path == "/health":
            return web.Response(status=self.health, headers={"Date": formatdate(SystemClock.wall() + self.ahead)})
        if request.path == "/metrics":
            return web.Response(text=self._metrics())
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 4096}, {"id": "lora", "parent": "m"}]})
        if request.path == "/v1/completions" and self.completes:
            return await self._complete(request)
        return web.json_response({"detail": "Not Found"}, status=404)

    def _metrics(self) -> str:
        values = {"running": self.running, "caching": self.says_caching, "hits": self.hits, "queries": 0}
        lines = METRICS.format(**values).splitlines(keepends=True)
        if self.nixl:
            lines.append("vllm:nixl_xfer_time_seconds_count 0\n")
        return "".join(line for line in lines if not self.without or self.without not in line)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("stream"):
            return await self._stream(request)
        if self.caches and body["prompt"] in self.prompts:
            self.hits += 32
        self.prompts.append(body["prompt"])
        self.handed_over += "kv_transfer_params" in body
        params = self.kv_params if "kv_transfer_params" in body else None
        return web.json_response({"usage": {"prompt_tokens": 70}, "kv_transfer_params": params})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: {}\n\n")
                await asyncio.sleep(0.02)
        except ConnectionError:
            if self.aborts:
                self.running -= 1
        return response


@asynccontextmanager
async def serving(pod: FakePod) -> AsyncIterator[FakePod]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pod.reply)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pod.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield pod
    finally:
        await runner.cleanup()


async def seen(url: str, manner: ProbeOptions = MANNER) -> PodReport:
    [found] = await probe_pods([url], manner, SystemClock(), Random(1))
    return found


def of(found: PodReport, check: str) -> Finding:
    """The first of its findings of this check."""
    return next(finding for finding in of_pod(found) if finding.check == check)


def bad(found: PodReport) -> set[tuple[str, Level]]:
    return {(finding.check, finding.level) for finding in of_pod(found) if finding.is_bad}
