"""Messages of a gateway at the port for ext_proc."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import grpc
import grpc.aio
from google.protobuf import json_format

from bench.fuzzing.inputs import LATE, Check
from bench.fuzzing.talk import PATIENCE, proxy_before, respond_well
from proxy.extproc import messages
from tests.helpers.waiting import until

QUIET = 0.02

LAST = b"."
"""Ends a line with the last piece of a body."""

DEFECT = grpc.StatusCode.UNKNOWN
"""How a stream ends that raised an error. INTERNAL is what the client makes of an end while it writes."""


@asynccontextmanager
async def gateway() -> AsyncIterator[Check]:
    """A line of the input is a message in JSON, or `<` or `>` and a piece of the body of the request or response."""
    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(await asyncio.start_server(respond_well, "127.0.0.1", 0))
        own = {"extproc": {"host": "127.0.0.1", "port": 0}, "models": {"aliases": {"other": "m"}}}
        app = await stack.enter_async_context(proxy_before(pod, **own))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{app.picker_port}"))
        process = channel.stream_stream(
            f"/{messages.SERVICE}/Process",
            messages.ProcessingRequest.SerializeToString,
            messages.ProcessingResponse.FromString,
        )

        async def check(data: bytes, rng: random.Random) -> str:
            call = process(_spoken(data, rng))
            try:
                async with asyncio.timeout(PATIENCE):
                    with suppress(grpc.aio.AioRpcError):
                        async for reply in call:
                            if b"Internal error" in reply.immediate_response.body:
                                return f"answered {reply.immediate_response.body!r}"
                    code = await call.code()
            except TimeoutError:
                call.cancel()
                return f"{LATE}the gateway was left waiting"
            if code is DEFECT:
                return f"the stream ended with {code}: {await call.details()}"
            await until(lambda: app.ledger.in_flight == 0, PATIENCE)
            return ""

        yield check


async def _spoken(data: bytes, rng: random.Random) -> AsyncIterator[Any]:
    """The messages. A real gateway does not end the stream before it has its replies."""
    for line in data.split(b"\n"):
        if (message := _message(line)) is not None:
            yield message
    await asyncio.sleep(rng.choice((0, QUIET)))


def _message(line: bytes) -> Any:
    """None for what is no message."""
    if line[:1] in (b"<", b">"):
        kind = "request_body" if line[:1] == b"<" else "response_body"
        body = {"body": line[1:].removesuffix(LAST), "end_of_stream": line.endswith(LAST)}
        return messages.ProcessingRequest(**{kind: body})
    try:
        return json_format.Parse(line, messages.ProcessingRequest(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError, UnicodeDecodeError):
        return None
