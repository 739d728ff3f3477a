"""The APIs that read and do not write: embeddings, scores, classes. Their answers are functions of the text alone."""

from __future__ import annotations

import math
from base64 import b64encode
from random import Random
from struct import pack
from typing import Any

from aiohttp import web
from xxhash import xxh3_64_intdigest

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import Call, Service, json_response
from proxy.lab.sim.api.completions import prompts_of
from proxy.lab.sim.api.errors import invalid
from proxy.lab.sim.api.generation import generation
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.prompt import flatten, render_chat
from proxy.lab.sim.sequence import Sampling

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
        model = call.take_model(body, self._service.config)
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
