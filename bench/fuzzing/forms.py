"""Forms at the data port: which model a key is checked against, and which model the engine then reads.

The engine's side is the parser that vLLM uses: Starlette with python-multipart. Where it is not installed, forms are
only looked at for crashes and hangs. python-multipart 0.0.20 reads headers with Python's `email` package, and 0.0.34
itself: each finds what the other does not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bench.fuzzing.inputs import LATE, Check, cut
from bench.fuzzing.talk import GOOD, exchange, proxy_before, read_request

try:
    from starlette.formparsers import MultiPartException
    from starlette.requests import Request
except ImportError:
    HAS_ENGINE = False
else:
    HAS_ENGINE = True

ALLOWED, OTHER = "a", "secret"

FILL = b"@FILL@"
"""Stands for an upload that is too large to be kept whole before the model is known."""

PATHS = (b"/v1/audio/transcriptions", b"/v1/audio/translations", b"/v1/images/edits")
HEAD = b"POST %b HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\nconnection: close\r\ncontent-type: %b\r\n"


@asynccontextmanager
async def multipart() -> AsyncIterator[Check]:
    """The first line of an input is the content type, the rest is the form."""
    seen: list[tuple[Mapping[str, str], bytes]] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                line, headers, body = await read_request(reader)
                if line.startswith(b"POST"):
                    seen.append((headers, body))
                writer.write(GOOD)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            pass
        finally:
            writer.close()

    security = {"apiKeys": [{"name": "team", "key": "k", "models": [ALLOWED, "alias"]}]}
    more = {"served": (ALLOWED, OTHER), "security": security, "models": {"aliases": {"alias": ALLOWED}}}
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as pod, proxy_before(pod, **more) as app:

        async def check(data: bytes, rng: random.Random) -> str:
            seen.clear()
            content_type, _, form = data.partition(b"\n")
            content_type = content_type.translate(None, b"\r\0")
            form = form.replace(FILL, b"x" * 100_000, 2)
            head, body = HEAD % (rng.choice(PATHS), content_type), form
            if rng.randrange(2):
                head += b"content-length: %d\r\n\r\n" % len(body)
            else:
                head += b"transfer-encoding: chunked\r\n\r\n"
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
            response = await exchange(app.port, cut(head + body, rng))
            if response is None:
                return f"{LATE}the client was left waiting"
            if response[9:12] == b"500":
                return f"answered {response!r}"
            if app.ledger.in_flight:
                return "requests are in flight that have ended"
            for headers, forwarded in seen:
                model = await engine_model(headers, forwarded)
                if model is not None and model.strip() != ALLOWED:  # no engine serves a name with spaces around it
                    return f"the key may use {ALLOWED!r}, and the engine reads {model!r}"
            return ""

        yield check


async def engine_model(headers: Mapping[str, str], body: bytes) -> str | None:
    """Return the `model` that FastAPI hands to vLLM, None where it refuses the form. Without one, vLLM uses its base
    model."""
    if not HAS_ENGINE:
        return None
    sent = False

    async def receive() -> dict[str, object]:
        nonlocal sent
        if sent:
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": pairs}, receive)
    try:
        form = await request.form()
    except (MultiPartException, ValueError, LookupError):
        return None
    if all(isinstance(form.get(name), str | None) for name in ("file", "image")):
        return None  # an upload is required
    model = form.get("model")
    if model is None or model == "":
        return "the base model"
    return model if isinstance(model, str) else None
