"""Python frames and files that one request crosses: `python bench/frames.py [--json] [--list]`.

kvlane runs in this process, with the default configuration, before four pods and one client that are a few lines of
asyncio. After a warm-up, a profile function counts each function of `proxy/` that is called, and each coroutine that
is resumed, between the first byte of a request and the end of its response. The smallest count of several requests is
printed: scrapes and timers run during some of them. Counts do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop

import proxy
from bench.rig import table
from proxy.app import App
from proxy.settings import Settings, from_mapping

PACKAGE = str(Path(proxy.__file__).parent)
MODEL = "model"
SCRAPE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
MODELS = b'{"object":"list","data":[{"id":"model","object":"model"}]}'
WHOLE = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 250, "completion_tokens": 1, "total_tokens": 251},
    }
).encode()
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
PODS = 4
PROMPT_BYTES = 1000
WARM_UP, MEASURED = 200, 100
FEW_EVENTS, MANY_EVENTS = 4, 36
EVENT_SECONDS = 0.002
"""Between two events, so that each is one read of the proxy's."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one request crosses."""

    frames: int
    files: int
    functions: Counter[tuple[str, str]]


class Counting:
    """A profile function; counts while it is installed."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(PACKAGE):
            self.calls[name[len(PACKAGE) + 1 :], frame.f_code.co_qualname] += 1

    def crossing(self) -> Crossing:
        return Crossing(self.calls.total(), len({name for name, _ in self.calls}), self.calls)


async def main(options: argparse.Namespace) -> None:
    say = partial(print, file=_own_output())
    async with AsyncExitStack() as stack:
        pods = [await stack.enter_async_context(_pod()) for _ in range(PODS)]
        port = (await stack.enter_async_context(App(_settings(pods)))).port
        whole = await _crossing(port, stream_events=0)
        few = await _crossing(port, FEW_EVENTS)
        many = await _crossing(port, MANY_EVENTS)
    per_event = _per_event(many.functions - few.functions)
    found = {"frames": whole.frames, "files": whole.files, "stream": few.frames, "stream_files": few.files}
    if options.json:
        say(json.dumps({**found, "per_event": per_event}))
        return
    rows = [["", "frames", "files"]]
    rows.append(["a chat request of 1 KB, complete response", str(whole.frames), str(whole.files)])
    rows.append([f"the same, streamed in {FEW_EVENTS} events", str(few.frames), str(few.files)])
    rows.append(["one more event", f"{per_event:.2f}", ""])
    say(table(rows))
    if options.list:
        say("\ncomplete  streamed")
        for name, function in sorted(whole.functions | few.functions):
            say(f"{whole.functions[name, function]:8}  {few.functions[name, function]:8}  {name} {function}")


def _per_event(more: Counter[tuple[str, str]]) -> float:
    """Without what runs now and then, as timers do."""
    events = MANY_EVENTS - FEW_EVENTS
    return sum(count for count in more.values() if count >= events / 2) / events


def _own_output() -> TextIO:
    """Standard output as it was, while the access log goes nowhere."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return own


async def _crossing(port: int, stream_events: int) -> Crossing:
    """The smallest of several."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = _request(stream_events)
    crossings = []
    for turn in range(WARM_UP + MEASURED):
        counting = Counting()
        if turn >= WARM_UP:
            sys.setprofile(counting)
        writer.write(request)
        response = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in response.split(b"\r\n", 1)[0]:
            raise SystemExit(response.decode())
        if stream_events:
            await reader.readuntil(b"\r\n0\r\n\r\n")
        else:
            await reader.readexactly(len(WHOLE))
        for _ in range(3):
            await asyncio.sleep(0)
        sys.setprofile(None)
        crossings.append(counting.crossing())
        await asyncio.sleep(0.005)
    writer.close()
    return min(crossings[WARM_UP:], key=lambda one: one.frames)


def _settings(pods: Sequence[str]) -> Settings:
    return from_mapping(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"host": "127.0.0.1", "port": 0},
            "pods": {"static": [{"url": pod} for pod in pods]},
        }
    )


def _request(stream_events: int) -> bytes:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "word " * (PROMPT_BYTES // 5)}]}
    if stream_events:
        body |= {"stream": True, "max_tokens": stream_events}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: kvlane\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


@asynccontextmanager
async def _pod() -> AsyncIterator[str]:
    server = await asyncio.start_server(_respond, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            if head.startswith(b"GET"):
                _send(writer, MODELS if b"/v1/models" in head else SCRAPE)
            elif body.get("stream"):
                await _stream(writer, body["max_tokens"])
            else:
                _send(writer, WHOLE)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    kind = b"application/json" if body.startswith(b"{") else b"text/plain"
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body))


async def _stream(writer: asyncio.StreamWriter, events: int) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for event in [EVENT] * events:
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await asyncio.sleep(EVENT_SECONDS)
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--list", action="store_true", help="each function with its calls for a complete and for a streamed response"
    )
    uvloop.run(main(parser.parse_args()))
