"""The APIs that generate no text: embeddings, scores, classes, tokens, audio and the realtime WebSocket."""

from __future__ import annotations

import math
import re
from base64 import b64encode
from random import Random
from struct import pack
from typing import Any

import orjson
from aiohttp import WSMessage, WSMsgType, web
from xxhash import xxh3_64_intdigest

from proxy.lab.sim import fields
from proxy.lab.sim.completions import chat_prompt, prompts_of
from proxy.lab.sim.fields import BadRequest, invalid
from proxy.lab.sim.generation import generation
from proxy.lab.sim.http import SERVER, Call, Service, json_response
from proxy.lab.sim.routes import Route
from proxy.lab.sim.sequence import Sampling, flatten, render_chat, token_ids

DIMENSIONS = 64
LABELS = 2

Json = dict[str, Any]


class Pooling:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/embeddings", self.embed),
            Route("POST", "/pooling", self.pool),
            Route("POST", "/classify", self.classify),
            *(Route("POST", path, self.score) for path in ("/score", "/v1/score")),
            *(Route("POST", path, self.rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ]

    async def embed(self, call: Call) -> web.StreamResponse:
        body = call.body()
        inputs = _inputs(body)
        model, usage = await self._read(call, body, inputs)
        dimensions = fields.positive(body, "dimensions", DIMENSIONS)
        vectors = [_encoded(_vector(text, dimensions), body) for text in inputs]
        data = [{"index": i, "object": "embedding", "embedding": vector} for i, vector in enumerate(vectors)]
        return json_response(self._listed("embd", call, model, data, usage))

    async def pool(self, call: Call) -> web.StreamResponse:
        body = call.body()
        inputs = _inputs(body)
        model, usage = await self._read(call, body, inputs)
        vectors = [_encoded(_vector(text, DIMENSIONS), body) for text in inputs]
        data = [{"index": i, "object": "pooling", "data": vector} for i, vector in enumerate(vectors)]
        return json_response(self._listed("pool", call, model, data, usage))

    async def classify(self, call: Call) -> web.StreamResponse:
        body = call.body()
        inputs = _inputs(body)
        model, usage = await self._read(call, body, inputs)
        data = [{"index": i, **_classes(text)} for i, text in enumerate(inputs)]
        return json_response(self._listed("classify", call, model, data, usage))

    async def score(self, call: Call) -> web.StreamResponse:
        body = call.body()
        pairs = _pairs(body)
        model, usage = await self._read(call, body, pairs)
        data = [{"index": i, "object": "score", "score": _score(pair)} for i, pair in enumerate(pairs)]
        return json_response(self._listed("score", call, model, data, usage))

    async def rerank(self, call: Call) -> web.StreamResponse:
        body = call.body()
        query = flatten(fields.required(body, "query"))
        documents = [flatten(item) for item in _list(body, "documents")]
        pairs = [f"{query}\n{document}".encode() for document in documents]
        model, usage = await self._read(call, body, pairs)
        results: list[Json] = [
            {"index": i, "document": {"text": documents[i]}, "relevance_score": _score(pair)}
            for i, pair in enumerate(pairs)
        ]
        results.sort(key=lambda result: result["relevance_score"], reverse=True)
        best = results[: fields.integer(body, "top_n", 0) or None]
        return json_response({"id": f"rerank-{call.id}", "model": model, "usage": usage, "results": best})

    async def _read(self, call: Call, body: fields.Body, texts: list[bytes]) -> tuple[str, Json]:
        """Takes the engine's time for the prompts; returns model and usage."""
        model = call.resolve_model(body, self._service.config)
        with generation(self._service, call, model, texts, Sampling(max_tokens=0), body) as reading:
            await reading.ended()
        return model, reading.usage.as_json()

    def _listed(self, kind: str, call: Call, model: str, data: list[Json], usage: Json) -> Json:
        created = int(self._service.wall())
        head = {"id": f"{kind}-{call.id}", "object": "list", "created": created, "model": model}
        return head | {"data": data, "usage": usage}


def _inputs(body: fields.Body) -> list[bytes]:
    if "messages" in body:
        return [render_chat(fields.objects(body, "messages"))]
    return prompts_of(body, "input")


def _pairs(body: fields.Body) -> list[bytes]:
    """One query against each document, or text by text."""
    left, right = _list(body, "text_1", "queries"), _list(body, "text_2", "documents")
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise invalid("value_error", "body.text_1", "Input lengths must be either 1:1, 1:N or N:N", left)
    return [f"{flatten(one)}\n{flatten(other)}".encode() for one, other in zip(left, right, strict=True)]


def _list(body: fields.Body, *names: str) -> list[object]:
    """The first of the names that is there, as a list."""
    name = next((name for name in names if name in body), names[0])
    value = fields.required(body, name)
    return value if isinstance(value, list) else [value]


def _vector(text: bytes, dimensions: int) -> list[float]:
    """Of length 1."""
    random = Random(xxh3_64_intdigest(text))
    values = [random.uniform(-1, 1) for _ in range(dimensions)]
    length = math.hypot(*values)
    return [value / length for value in values]


def _encoded(vector: list[float], body: fields.Body) -> list[float] | str:
    if body.get("encoding_format") == "base64":
        return b64encode(pack(f"<{len(vector)}f", *vector)).decode()
    return vector


def _score(text: bytes) -> float:
    return Random(xxh3_64_intdigest(text)).random()


def _classes(text: bytes) -> Json:
    first = _score(text)
    probabilities = [first, 1 - first]
    label = f"LABEL_{probabilities.index(max(probabilities))}"
    return {"label": label, "probs": probabilities, "num_classes": LABELS}


class Tokens:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("POST", "/tokenize", self.tokenize), Route("POST", "/detokenize", self.detokenize)]

    async def tokenize(self, call: Call) -> web.StreamResponse:
        body = call.body()
        call.resolve_model(body, self._service.config)
        prompt = chat_prompt(fields.objects(body, "messages"), body) if "messages" in body else _prompt(body, "prompt")
        tokens = token_ids(prompt)
        length = self._service.config.max_model_len
        return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def detokenize(self, call: Call) -> web.StreamResponse:
        body = call.body()
        call.resolve_model(body, self._service.config)
        text = _prompt(body, "tokens").rstrip(b"\0")
        return json_response({"prompt": text.decode(errors="replace")})


def _prompt(body: fields.Body, name: str) -> bytes:
    return b"".join(prompts_of(body, name))


SAMPLES_PER_CHARACTER = 160
"""Bytes of speech for each byte of text."""

Form = dict[str, bytes]


class Audio:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/audio/transcriptions", self.transcribe),
            Route("POST", "/v1/audio/translations", self.transcribe),
            Route("POST", "/v1/audio/speech", self.speak),
        ]

    async def transcribe(self, call: Call) -> web.StreamResponse:
        """States how many bytes of audio came."""
        form = parse_form(call)
        if "file" not in form:
            raise invalid("missing", "body.file", "Field required", None)
        call.resolve_model({"model": form["model"].decode()} if "model" in form else {}, self._service.config)
        text = f"{len(form['file'])} bytes of audio"
        if form.get("response_format") == b"text":
            return web.Response(text=text, headers={"Server": SERVER})
        return json_response({"text": text, "usage": {"type": "duration", "seconds": 1}})

    async def speak(self, call: Call) -> web.StreamResponse:
        body = call.body()
        text = str(fields.required(body, "input")).encode()
        call.resolve_model(body, self._service.config)
        sound = b"RIFF" + text * SAMPLES_PER_CHARACTER
        return web.Response(body=sound, content_type="audio/wav", headers={"Server": SERVER})


def parse_form(call: Call) -> Form:
    """The parts of a multipart body by their names."""
    boundary = re.search(r'boundary="?([^";]+)', call.request.headers.get("Content-Type", ""))
    if boundary is None:
        raise BadRequest("Missing boundary in multipart.")
    parts = (b"\r\n" + call.raw).split(b"\r\n--" + boundary[1].encode())
    return dict(_part(part) for part in parts[1:-1])


def _part(part: bytes) -> tuple[str, bytes]:
    head, _, content = part.partition(b"\r\n\r\n")
    name = re.search(rb'\bname="([^"]*)"', head)
    return (name[1].decode() if name else "", content)


class Realtime:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("GET", "/v1/realtime", self.talk)]

    async def talk(self, call: Call) -> web.StreamResponse:
        call.resolve_model(dict(call.request.query), self._service.config)
        socket = web.WebSocketResponse()
        await socket.prepare(call.request)
        await socket.send_json({"type": "session.created", "id": f"sess-{call.id}", "model": call.record.model})
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
