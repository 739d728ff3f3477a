"""An engine with data-parallel ranks behind one port, on a real socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType

from aiohttp import web

from tests.helpers.fleet.pods import models
from tests.helpers.ports import free_port

BLOCKS = 100


class RankedPod:
    """Each rank caches prompts and counts tokens. A request goes to the rank that it names, unless the engine does not
    obey: then the ranks take turns."""

    def __init__(self, size: int, *, obeys: bool = True, engine: str = "vllm", first: int = 0) -> None:
        self.size = size
        self.obeys = obeys
        self.engine = engine
        self.first = first
        """The number of the first rank in metrics; not 0 on later nodes of vLLM's hybrid balancing."""
        self.started = 1000.0
        self.requests: list[tuple[int, Mapping[str, str], bytes]] = []
        """Rank, headers and body of each request."""
        self.scrapes = 0
        self.prompt_tokens = [0] * size
        self.cached: list[set[str]] = [set() for _ in range(size)]
        self.running = [0] * size
        self.status: int = 200
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> RankedPod:
        self._runner = web.ServerRunner(web.Server(self._respond), shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def resize(self, size: int) -> None:
        more = size - self.size
        self.prompt_tokens = [*self.prompt_tokens, *[0] * more][:size]
        self.cached = [*self.cached, *[set[str]() for _ in range(more)]][:size]
        self.running = [*self.running, *[0] * more][:size]
        self.size = size

    @property
    def requested_ranks(self) -> list[int]:
        return [rank for rank, _, _ in self.requests]

    def exposition(self) -> str:
        sglang = self.engine == "sglang"
        prefix, label = ("sglang", "dp_rank") if sglang else ("vllm", "engine")
        names = ("num_running_reqs", "num_queue_reqs") if sglang else ("num_requests_running", "num_requests_waiting")
        running, waiting = names
        lines = [f"process_start_time_seconds {self.started}"]
        for rank in range(self.size):
            labels = f'model_name="m",{label}="{rank + self.first}"'
            lines += [
                f"{prefix}:{running}{{{labels}}} {self.running[rank]}",
                f"{prefix}:{waiting}{{{labels}}} 0",
                f"{prefix}:prompt_tokens_total{{{labels}}} {self.prompt_tokens[rank]}",
                f'{prefix}:cache_config_info{{{labels},block_size="16",num_gpu_blocks="{BLOCKS}"}} 1',
            ]
        return "\n".join(lines) + "\n"

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/metrics":
            self.scrapes += 1
            return web.Response(text=self.exposition())
        if request.path == "/v1/models":
            return web.json_response(models("m"))
        if request.path == "/health":
            return web.Response()
        return await self._complete(request)

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        fields = json.loads(body)
        rank = self._rank(request, fields)
        self.requests.append((rank, dict(request.headers), body))
        if self.status != 200:
            return web.json_response({"error": {"message": "broken"}}, status=self.status)
        if not 0 <= rank < self.size:
            message = f"data_parallel_rank {rank} is out of range [0, {self.size})."
            return web.json_response({"error": {"message": message}}, status=400)
        prompt = json.dumps(fields.get("messages") or fields.get("prompt"))
        tokens = max(1, len(prompt) // 4)
        cached = tokens if prompt in self.cached[rank] else 0
        self.cached[rank].add(prompt)
        self.prompt_tokens[rank] += tokens
        counts = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        usage = {**counts, "prompt_tokens_details": {"cached_tokens": cached}}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        return web.json_response({"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})

    def _rank(self, request: web.BaseRequest, fields: Mapping[str, object]) -> int:
        named = request.headers.get("X-data-parallel-rank")
        if self.engine == "sglang":
            named = str(fields.get("data_parallel_rank", ""))
        return int(named) if self.obeys and named else len(self.requests) % self.size
