"""What several tests of the simulated engine need."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from proxy.lab.sim import SamplingParams, Sequence, SimEngine, SimPod

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Tell me of the sea."}]


def sequence(prompt_tokens: int, max_tokens: int = 1, *, text: bytes = b"p", root: int = 0) -> Sequence:
    """A prompt of so many tokens, different for each `text`."""
    prompt = (text + b"|" + b"word" * prompt_tokens)[: 4 * prompt_tokens]
    return Sequence(prompt, SamplingParams(max_tokens=max_tokens), root)


def run(engine: SimEngine, now: float = 0.0) -> float:
    """Step until no sequence is left; return the time."""
    while engine.busy:
        _, duration = engine.step(now)
        now += duration
    return now


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return orjson.loads(await response.read())


async def refusal(session: aiohttp.ClientSession, path: str, **body: Any) -> tuple[int, Any]:
    async with session.post(path, json=body) as response:
        return response.status, orjson.loads(await response.read())


async def stream(session: aiohttp.ClientSession, path: str, **body: Any) -> list[Any]:
    """The events' data; [DONE] as the string it is."""
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [line if line == "[DONE]" else orjson.loads(line) for line in found]


def is_idle(pod: SimPod) -> bool:
    return not pod.engine.busy and not pod.requests.open
