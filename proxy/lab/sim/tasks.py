"""Handlers of the APIs that generate no text: embeddings, scores, classes, tokens, audio and the realtime WebSocket."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Awaitable, Callable
from random import Random
from struct import pack

import orjson
from aiohttp import WSMessage, WSMsgType, web
from xxhash import xxh3_64_intdigest

from proxy.lab.sim import fields
from proxy.lab.sim.completions import chat_prompt, prompts_of
from proxy.lab.sim.fields import Json, SimError, invalid
from proxy.lab.sim.generation import generation, response_head
from proxy.lab.sim.http import Routes, SimRequest, json_response
from proxy.lab.sim.sequence import SamplingParams, flatten, render_chat, token_ids

DIMENSIONS = 64


async def rerank(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    query = flatten(fields.required(body, "query"))
    documents = [flatten(item) for item in _list(body, "documents")]
    pairs = [f"{query}\n{document}".encode() for document in documents]
    model, usage = await _computed(request, body, pairs)
    results: list[Json] = [
        {"index": i, "document": {"text": documents[i]}, "relevance_score": _score(pair)}
        for i, pair in enumerate(pairs)
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    best = results[: fields.integer(body, "top_n", 0) or None]
    return json_response({"id": f"rerank-{request.id}", "model": model, "usage": usage, "results": best})


def _listing(
    kind: str, read: Callable[[Json], list[bytes]], render: Callable[[bytes, Json], Json]
) -> Callable[[SimRequest], Awaitable[web.StreamResponse]]:

    async def handle(request: SimRequest) -> web.StreamResponse:
        body = request.body()
        texts = read(body)
        model, usage = await _computed(request, body, texts)
        data = [{"index": i, **render(text, body)} for i, text in enumerate(texts)]
        return json_response(response_head(request, kind, "list", model) | {"data": data, "usage": usage})

    return handle


async def _computed(request: SimRequest, body: Json, texts: list[bytes]) -> tuple[str, Json]:
    """Spend the engine's time for the prompts; return model and usage."""
    model = request.resolve_model(body)
    reading = generation(request, model, texts, SamplingParams(max_tokens=0), body)
    await reading.run()
    return model, reading.usage.as_json()


def _inputs(body: Json) -> list[bytes]:
    if "messages" in body:
        return [render_chat(fields.objects(body, "messages"))]
    return prompts_of(body, "input")


def _pairs(body: Json) -> list[bytes]:
    """Return the pairs to compare: one text with each of the others, or texts at equal positions."""
    left, right = _list(body, "text_1", "queries"), _list(body, "text_2", "documents")
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise invalid("value_error", "body.text_1", "Input lengths must be either 1:1, 1:N or N:N", left)
    return [f"{flatten(one)}\n{flatten(other)}".encode() for one, other in zip(left, right, strict=True)]


def _list(body: Json, *names: str) -> list[object]:
    """Return the value of the first of these names in the body, as a list."""
    name = next((name for name in names if name in body), names[0])
    value = fields.required(body, name)
    return value if isinstance(value, list) else [value]


def _vector(text: bytes, body: Json) -> list[float] | str:
    """Return a vector of length 1, in the encoding and with the dimensions that the body requests."""
    dimensions = fields.positive(body, "dimensions", DIMENSIONS)
    random = Random(xxh3_64_intdigest(text))
    values = [random.uniform(-1, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    vector = [value / length for value in values]
    if body.get("encoding_format") == "base64":
        return b64encode(pack(f"<{dimensions}f", *vector)).decode()
    return vector


def _score(text: bytes) -> float:
    return Random(xxh3_64_intdigest(text)).random()


def _classes(text: bytes, body: Json) -> Json:
    first = _score(text)
    label = "LABEL_0" if first >= 0.5 else "LABEL_1"
    return {"label": label, "probs": [first, 1 - first], "num_classes": 2}


async def tokenize(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    request.resolve_model(body)
    prompt = chat_prompt(fields.objects(body, "messages"), body) if "messages" in body else _prompt(body, "prompt")
    tokens = token_ids(prompt)
    length = request.config.max_model_len
    return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})


async def detokenize(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    request.resolve_model(body)
    text = _prompt(body, "tokens").rstrip(b"\0")
    return json_response({"prompt": text.decode(errors="replace")})


def _prompt(body: Json, name: str) -> bytes:
    return b"".join(prompts_of(body, name))


SAMPLES_PER_CHARACTER = 160
"""Bytes of speech for each byte of text."""


async def transcribe(request: SimRequest) -> web.StreamResponse:
    form = parse_form(request)
    if "file" not in form:
        raise invalid("missing", "body.file", "Field required", None)
    request.resolve_model({"model": form["model"].decode()} if "model" in form else {})
    text = f"{len(form['file'])} bytes of audio"
    if form.get("response_format") == b"text":
        return web.Response(text=text)
    return json_response({"text": text, "usage": {"type": "duration", "seconds": 1}})


async def speak(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    text = str(fields.required(body, "input")).encode()
    request.resolve_model(body)
    sound = b"RIFF" + text * SAMPLES_PER_CHARACTER
    return web.Response(body=sound, content_type="audio/wav")


def parse_form(request: SimRequest) -> dict[str, bytes]:
    boundary = re.search(r'boundary="?([^";]+)', request.web_request.headers.get("Content-Type", ""))
    if boundary is None:
        raise SimError("Missing boundary in multipart.")
    parts = (b"\r\n" + request.raw).split(b"\r\n--" + boundary[1].encode())
    return dict(_part(part) for part in parts[1:-1])


def _part(part: bytes) -> tuple[str, bytes]:
    head, _, content = part.partition(b"\r\n\r\n")
    name = re.search(rb'\bname="([^"]*)"', head)
    return (name[1].decode() if name else "", content)


async def realtime(request: SimRequest) -> web.StreamResponse:
    request.resolve_model(dict(request.web_request.query))
    socket = web.WebSocketResponse()
    await socket.prepare(request.web_request)
    await socket.send_json({"type": "session.created", "id": f"sess-{request.id}", "model": request.record.model})
    async for message in socket:
        await _echo(socket, message)
    return socket


async def _echo(socket: web.WebSocketResponse, message: WSMessage) -> None:
    if message.type is WSMsgType.BINARY:
        await socket.send_bytes(message.data)
        return
    try:
        event = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        await socket.send_json({"type": "error", "error": {"message": "Invalid JSON"}})
        return
    await socket.send_json({"type": "echo", "event": event})


ROUTES: Routes = {
    "POST /v1/embeddings": _listing(
        "embd", _inputs, lambda text, body: {"object": "embedding", "embedding": _vector(text, body)}
    ),
    "POST /pooling": _listing("pool", _inputs, lambda text, body: {"object": "pooling", "data": _vector(text, body)}),
    "POST /classify": _listing("classify", _inputs, _classes),
    **dict.fromkeys(
        ("POST /score", "POST /v1/score"),
        _listing("score", _pairs, lambda pair, body: {"object": "score", "score": _score(pair)}),
    ),
    **dict.fromkeys(("POST /rerank", "POST /v1/rerank", "POST /v2/rerank"), rerank),
    "POST /tokenize": tokenize,
    "POST /detokenize": detokenize,
    **dict.fromkeys(("POST /v1/audio/transcriptions", "POST /v1/audio/translations"), transcribe),
    "POST /v1/audio/speech": speak,
    "GET /v1/realtime": realtime,
}
