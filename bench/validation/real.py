"""A real engine: started if need be, and asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from bench.validation.script import Session, TurnResult
from tests.helpers.ports import free_port
from tests.vllm import tiny_model
from tests.vllm.client import Client
from tests.vllm.fleet import ENVIRON, FLAGS, MODEL, START_UP
from tests.vllm.program import Program

KV_BYTES = 64 << 20
"""512 blocks of 32 tokens: so few that the documents push conversations out."""


@dataclass(slots=True)
class Stream:
    """What came of one request, and when, in seconds after `sent`."""

    sent: float
    times: list[float]
    """Of every token; several may come at once."""
    ids: list[int]
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def per_token(self) -> float:
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


class Real:
    """`model` is asked for at `url`, on connections that stay open."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def ask(self, prompt: Sequence[int], tokens: int) -> Stream:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        stream = Stream(time.perf_counter(), [], [])
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _read(stream, json.loads(line[6:]))
        return stream

    async def play(self, sessions: Sequence[Session]) -> list[TurnResult]:
        """Ordered by session and turn."""
        begun = time.perf_counter()
        played = await asyncio.gather(*(self._converse(at, one, begun) for at, one in enumerate(sessions)))
        return [response for responses in played for response in responses]

    async def _converse(self, at: int, session: Session, begun: float) -> list[TurnResult]:
        await asyncio.sleep(begun + session.begins - time.perf_counter())
        responses, prompt = [], []
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.pause)
            prompt += turn.added
            stream = await self.ask(prompt, turn.output_tokens)
            prompt += stream.ids
            found = (stream.prompt_tokens, stream.cached_tokens, stream.times[0], stream.per_token)
            responses.append(TurnResult(at, number, *found))
        return responses


@contextmanager
def running(python: Path) -> Iterator[tuple[str, str]]:
    """URL and model of an engine that runs as long as the context. Raises RuntimeError if it does not start."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run([python, tiny_model.__file__, folder / "model", folder / "adapter"], check=True)
        port = free_port()
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
        command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, "--kv-cache-memory-bytes", str(KV_BYTES)]
        environ = {**ENVIRON, "VLLM_CPU_OMP_THREADS_BIND": "0"}
        program = stack.enter_context(Program(command, folder / "engine.log", environ))
        program.wait_until(Client(f"127.0.0.1:{port}").up, START_UP)
        yield f"http://127.0.0.1:{port}", MODEL


async def memory(session: aiohttp.ClientSession, url: str) -> tuple[int, int]:
    """Blocks that requests can have, and tokens of each. One block is the engine's own, as a placeholder."""
    async with session.get(f"{url}/metrics") as response:
        labels = re.search(r"^vllm:cache_config_info\{(.*)\}", await response.text(), re.M)
    if labels is None:
        raise RuntimeError("the engine does not say how much memory it has")
    labels_of = dict(re.findall(r'(\w+)="(\d+)"', labels[1]))
    return int(labels_of["num_gpu_blocks"]) - 1, int(labels_of["block_size"])


def _read(stream: Stream, event: dict[str, object]) -> None:
    now = time.perf_counter() - stream.sent
    for choice in event.get("choices") or ():  # type: ignore[attr-defined]
        new = choice.get("token_ids") or ()
        stream.ids += new
        stream.times += [now] * len(new)
    if usage := event.get("usage"):
        stream.prompt_tokens = usage["prompt_tokens"]  # type: ignore[index]
        stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0  # type: ignore[attr-defined]
