"""Clients that ask, and write down what they saw; some of them leave."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

import aiohttp
import orjson

SYSTEMS = 40
"""System prompts that clients share."""

LONG = (64 * 1024, 160 * 1024)
"""Bytes of a long prompt."""


class Saw(Enum):
    WHOLE = "whole"
    """200 and the complete response, as far as its form shows: a stream with its terminal event, or a body of its
    length."""
    REFUSED = "refused"
    """A status of 400 or more, or a stream that begins with an error, and its text."""
    ERROR_EVENT = "error event"
    """A stream that says that it is incomplete, and has no terminal event."""
    BROKEN = "broken"
    """The connection was lost during a response."""
    UNFINISHED = "unfinished"
    """A stream that ended in good order without a terminal event and without an error."""
    NOTHING = "nothing"
    """The connection was lost before a response."""
    LEFT = "left"
    """It went away by itself."""


@dataclass(frozen=True, slots=True)
class Ask:
    """`leaves_after` are seconds, None to stay; `timeout` is what its header grants the request, in seconds."""

    id: str
    path: str
    body: bytes
    stream: bool
    max_tokens: int
    leaves_after: float | None
    timeout: float | None


@dataclass(slots=True)
class Seen:
    """The result of one request. Times are in seconds of the event loop."""

    ask: Ask
    began: float
    ended: float = 0.0
    saw: Saw = Saw.NOTHING
    status: int | None = None
    reason: str = ""
    """Of a refusal, from its header."""
    body: bytes = b""
    """The end of a stream, or the whole of another response."""
    events: int = 0
    error: str = ""

    @property
    def claims_success(self) -> bool:
        return self.saw is Saw.WHOLE


def asks(number: int, seed: int, name: str = "chaos", leavers: float = 0.05) -> Iterator[Ask]:
    """The same ones in every run."""
    for index in range(number):
        yield _ask(f"{name}-{index}", Random(f"{seed} {name} {index}"), leavers)


def _ask(name: str, random: Random, leavers: float) -> Ask:
    text = f"question {name} of {random.randrange(10**9)}: " + "what is it? " * random.randrange(40)
    if random.random() < 0.04:
        text += "and then " * (random.randint(*LONG) // 9)
    stream, max_tokens = random.random() < 0.6, random.randint(5, 40)
    body: dict[str, Any] = {"model": "sim", "max_tokens": max_tokens, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    system = f"You are assistant {random.randrange(SYSTEMS)}. " * 30
    if random.random() < 0.25:
        path, body["prompt"] = "/v1/completions", system + text
    else:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    leaves_after = random.uniform(0.0, 0.08) if random.random() < leavers else None
    timeout = random.choice((2.0, 5.0)) if random.random() < 0.05 else None
    return Ask(name, path, orjson.dumps(body), stream, max_tokens, leaves_after, timeout)


class Clients:
    """Run `at_once` clients; each sends its next request after its response."""

    def __init__(self, url: str, at_once: int) -> None:
        self._url = url
        self._at_once = at_once

    async def run(self, planned: Iterator[Ask]) -> list[Seen]:
        seen: list[Seen] = []
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(self._url, connector=connector, timeout=timeout) as session:

            async def one_after_the_other() -> None:
                for ask in planned:  # each client takes the next one that is left
                    seen.append(await probe(session, ask))  # noqa: PERF401

            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_once):
                    group.create_task(one_after_the_other())
        return seen


async def probe(session: aiohttp.ClientSession, ask: Ask) -> Seen:
    now = asyncio.get_running_loop().time
    seen = Seen(ask, now())
    try:
        async with asyncio.timeout(ask.leaves_after):
            await _read(session, ask, seen)
    except TimeoutError:
        seen.saw = Saw.LEFT
    except (aiohttp.ClientError, OSError) as error:
        seen.saw = Saw.NOTHING if seen.status is None else Saw.BROKEN
        seen.error = repr(error)
    seen.ended = now()
    return seen


async def _read(session: aiohttp.ClientSession, ask: Ask, seen: Seen) -> None:
    headers = {"content-type": "application/json", "x-request-id": ask.id}
    if ask.timeout is not None:
        headers["x-request-timeout-ms"] = str(round(ask.timeout * 1_000))
    async with session.post(ask.path, data=ask.body, headers=headers) as response:
        seen.status = response.status
        seen.reason = response.headers.get("x-kvlane-reason", "")
        raw = bytearray()
        async for piece in response.content.iter_any():
            raw += piece
    seen.events = raw.count(b"data: {")
    seen.body = bytes(raw[-2_000:])
    seen.saw = _verdict(ask, response, raw)


def _verdict(ask: Ask, response: aiohttp.ClientResponse, raw: bytearray) -> Saw:
    if response.status != 200 or raw.startswith(b'data: {"error"'):
        return Saw.REFUSED
    if not ask.stream or raw.endswith(b"data: [DONE]\n\n"):
        return Saw.WHOLE
    return Saw.ERROR_EVENT if b'data: {"error"' in raw[-2_000:] else Saw.UNFINISHED


def is_all_there(seen: Seen) -> bool:
    """Whether a response that looks complete has the requested number of tokens."""
    try:
        if seen.ask.stream:
            last = seen.body.rpartition(b"data: {")[2].partition(b"\n\n")[0]
            usage = orjson.loads(b"{" + last)["usage"]
        else:
            usage = orjson.loads(seen.body)["usage"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
    return bool(usage["completion_tokens"] == seen.ask.max_tokens)
