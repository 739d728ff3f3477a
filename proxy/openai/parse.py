"""What a request wants: model, prompt, stream and limits; one table has a parser per API."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson
import xxhash

from proxy.core.errors import BadRequest, InvalidJson
from proxy.core.request import EMPTY_PROMPT, Prompt
from proxy.openai import multipart, prompts
from proxy.openai.bodies import bounded_int

_STORED = "/v1/responses/"
_STORED_RESPONSE = re.compile(rf"{_STORED}([^/]+)")


@lru_cache(maxsize=64)
def response_id(path: str) -> str | None:
    """Return the id of the stored response in a path."""
    if not path.startswith(_STORED):
        return None
    found = _STORED_RESPONSE.match(path)
    return found[1] if found and found[1] != "render" else None


def model_in(query: str) -> str | None:
    """Return the model in a query: `/v1/realtime?model=…` has no body. Raise BadRequest for several models, because
    servers differ in which one they use."""
    if "model" not in query and "%" not in query:
        return None
    named = [value for name, value in parse_qsl(query.removeprefix("?"), keep_blank_values=True) if name == "model"]
    if len(named) > 1:
        raise BadRequest("The query has more than one 'model'; send one.", param="model")
    return named[0] if named else None


Body = Mapping[str, Any]

ENGINE_INTERNALS = frozenset(
    (
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
    )
)
"""Fields by which routers control engines. From a client they could redirect or crash a pod."""

_CARRIERS = frozenset(("vllm_xargs", "extra_args", "sampling_params"))
"""Objects of a body whose fields engines merge with those: as good as the body itself for steering an engine."""

_ADAPTERS = ("lora_path", "lora_request")
"""Fields with which SGLang and TensorRT-LLM select an adapter in addition to the model."""

_SUSPECT = ENGINE_INTERNALS | _CARRIERS | frozenset(_ADAPTERS)

_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of compressed bodies. kvlane decompresses none, which excludes decompression bombs."""

_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
"""Texts that pydantic converts to True, in any case."""

TOO_DEEP = "The request body is nested too deeply."

_DIGITS = re.compile(r"\s*\+?\d{1,15}(?:\.0*)?\s*", re.ASCII)
MOST_TOKENS = 1e15

CONVERSATION = 3
"""Messages at least of a conversation that goes on: a question, its response, and the next question."""

LONGEST_SALT = 1024
"""Characters of a cache_salt. A longer one is replaced by its digest, because a cache keeps salts for longer."""

SGLANG_GENERATE = "/generate"
"""SGLang's own API, which has other names for the common fields."""


class Parsed(NamedTuple):
    """`model` is None if the client named none; `body` goes to the pod: the client's bytes unless an engine-internal
    field was removed; `adapters` are named in addition to the model."""

    model: str | None
    body: bytes
    prompt: Prompt = EMPTY_PROMPT
    stream: bool = False
    max_tokens: int = 0
    previous_response_id: str | None = None
    adapters: tuple[str, ...] = ()


def parse(path: str, body: bytes, content_type: str = "application/json") -> Parsed:
    """Raise BadRequest for a body that no engine could understand. Validation is left to the engine."""
    if content_type != "application/json" and multipart.is_multipart(content_type):
        return Parsed(multipart.model_of(body, content_type), body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        fields = _lenient(body, error)
    if not isinstance(fields, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_kind(fields)}.")
    adapters: tuple[str, ...] = ()
    if not _SUSPECT.isdisjoint(fields):
        body, fields = _without_internals(body, fields)
        adapters = tuple(_adapters(fields))
    get = fields.get
    model, stream, stored, salt = get("model"), get("stream"), get("previous_response_id"), get("cache_salt")
    limit = get("max_completion_tokens") or get("max_tokens") or get("max_output_tokens")
    read = _READERS.get(path)
    if path == SGLANG_GENERATE:
        limit, salt = _most_new_tokens(fields), fields.get("extra_key")
    return Parsed(
        model if type(model) is str and model.strip() else _model(model),
        body,
        EMPTY_PROMPT
        if read is None
        else Prompt(
            read(fields),
            "" if salt is None else salt if isinstance(salt, str) and len(salt) <= LONGEST_SALT else _salt(salt),
            0,
            read is _chat and len(fields["messages"]) < CONVERSATION,
        ),
        stream if type(stream) is bool else stream is not None and _flag(stream),
        0 if limit is None else limit if type(limit) is int and limit > 0 else _whole_number(limit),
        None if stored is None else _text(stored, "previous_response_id"),
        adapters,
    )


def _lenient(body: bytes, strict: ValueError) -> Any:
    """Parse with Python's parser, which accepts NaN and lone surrogates: engines use it, so kvlane must not refuse
    them."""
    if not body:
        raise InvalidJson("The request has no body; send a JSON object.")
    try:
        return json.loads(body, parse_int=bounded_int)
    except RecursionError:
        raise InvalidJson(TOO_DEEP) from None
    except UnicodeDecodeError:
        packed = next((name for magic, name in _PACKED.items() if body.startswith(magic)), "")
        how = f"compressed ({packed}), which no engine reads; send it as it is" if packed else "not UTF-8"
        raise InvalidJson(f"The request body is {how}.") from None
    except ValueError:
        raise InvalidJson(f"The request body is not valid JSON: {strict}.") from None


def _without_internals(body: bytes, fields: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    if all(map(ENGINE_INTERNALS.isdisjoint, _objects_read(fields))):
        return body, fields
    try:
        kept = json.loads(body, parse_int=bounded_int)
        for read in list(_objects_read(kept)):
            for name in ENGINE_INTERNALS & read.keys():
                del read[name]
        return json.dumps(kept, separators=(",", ":")).encode(), kept
    except RecursionError:  # the strict reader goes deeper
        raise InvalidJson(TOO_DEEP) from None


def _adapters(fields: Body) -> Iterator[str]:
    for name in _ADAPTERS:
        given = fields.get(name)
        for one in given if isinstance(given, list) else (given,):
            if isinstance(one, dict):
                yield from (str(one[key]) for key in ("lora_name", "lora_path") if one.get(key) is not None)
            elif one is not None:
                yield str(one)


def _objects_read(fields: Any) -> Iterator[dict[str, Any]]:
    """Return the body and the objects in it in which engines also read their internal fields."""
    yield fields
    for name in _CARRIERS:
        carrier = fields.get(name)
        if isinstance(carrier, dict):
            yield carrier
            if isinstance(inner := carrier.get("extra_args"), dict):
                yield inner


def _model(model: Any) -> str | None:
    """Return None for no model: null, or the empty text, for which vLLM uses the model that it serves."""
    if model is None or model == "":
        return None
    if not isinstance(model, str):
        raise BadRequest(f"'model' must be a string, not {_kind(model)}.", param="model")
    return model


def _flag(value: Any) -> bool:
    """Return what engines read from a value that is no boolean, as pydantic converts 1, "true" and "yes"; False for
    what it refuses, because the engine will refuse it."""
    if isinstance(value, str):
        return value.lower() in _TRUE
    return isinstance(value, int | float) and value == 1


def _salt(salt: Any) -> str:
    """Return the digest of a long salt; empty for a salt that is no text."""
    return xxhash.xxh3_128_hexdigest(salt.encode("utf-8", "surrogatepass")) if isinstance(salt, str) else ""


def _whole_number(value: Any) -> int:
    """Return what engines read from a limit that is no positive integer, as pydantic converts "5" and 5.0; 0 for
    none."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = float(value)
    return int(value) if isinstance(value, int | float) and 0 < value < MOST_TOKENS and value == int(value) else 0


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    raise BadRequest(f"'{name}' must be a string, not {_kind(value)}.", param=name)


def _chat(fields: Body) -> tuple[bytes, ...]:
    messages = fields.get("messages")
    if type(messages) is list and not fields.get("tools"):
        plain = prompts.plain(messages)
        if plain is not None:
            return (plain,)
    return (prompts.chat(fields.get("tools"), _messages(fields)),)


def _chat_batch(fields: Body) -> tuple[bytes, ...]:
    return tuple(prompts.chat(fields.get("tools"), conversation) for conversation in _messages(fields))


def _anthropic(fields: Body) -> tuple[bytes, ...]:
    return (prompts.chat(fields.get("tools"), _messages(fields), system=fields.get("system")),)


def _responses(fields: Body) -> tuple[bytes, ...]:
    given = fields.get("input")
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    return (prompts.chat(fields.get("tools"), items, system=fields.get("instructions")),)


def _completions(fields: Body) -> tuple[bytes, ...]:
    return prompts.batch(fields.get("prompt"), "prompt")


def _inputs(fields: Body) -> tuple[bytes, ...]:
    return _chat(fields) if "messages" in fields else prompts.batch(fields.get("input"), "input")


MOST_REPEATED = 2 << 20
"""Largest number of bytes that a query takes in all its pairs."""


def _pairs(fields: Body) -> tuple[bytes, ...]:
    """Return the prompts of a cross encoder, which sees the query before each document. Lists of equal length are
    paired one to one; other lists are refused by engines. A long query is not repeated without bound."""
    queries = prompts.texts(fields.get("query", fields.get("queries", fields.get("text_1"))))
    documents = prompts.texts(fields.get("documents", fields.get("text_2")))
    if len(queries) == 1 and len(queries[0]) * len(documents) <= MOST_REPEATED:
        return tuple(queries[0] + document for document in documents) or queries
    if len(queries) == len(documents):
        return tuple(map(add, queries, documents))
    return queries + documents


def _token_generate(fields: Body) -> tuple[bytes, ...]:
    return prompts.batch(fields.get("token_ids"), "token_ids")


def _sglang_generate(fields: Body) -> tuple[bytes, ...]:
    ids = fields.get("input_ids")
    return prompts.batch(fields.get("text"), "text") if ids is None else prompts.batch(ids, "input_ids")


def _most_new_tokens(fields: Body) -> Any:
    """Return the limit; of a batch the limit of the first."""
    sampling = fields.get("sampling_params")
    first = sampling[0] if isinstance(sampling, list) and sampling else sampling
    return first.get("max_new_tokens") if isinstance(first, dict) else None


_READERS: dict[str, Callable[[Body], tuple[bytes, ...]]] = {
    "/v1/chat/completions": _chat,
    "/v1/chat/completions/batch": _chat_batch,
    "/v1/chat/completions/render": _chat,
    "/v1/completions": _completions,
    "/v1/completions/render": _completions,
    "/v1/embeddings": _inputs,
    "/v1/messages": _anthropic,
    "/v1/responses": _responses,
    "/v1/rerank": _pairs,
    "/v2/rerank": _pairs,
    "/rerank": _pairs,
    "/v1/score": _pairs,
    "/score": _pairs,
    "/classify": _inputs,
    "/pooling": _inputs,
    "/v1/audio/speech": _inputs,
    "/inference/v1/generate": _token_generate,
    SGLANG_GENERATE: _sglang_generate,
}


def _messages(fields: Body) -> list[Any]:
    messages = fields.get("messages")
    if messages is None:
        raise BadRequest("'messages' is missing; send a list of messages.", param="messages")
    if not isinstance(messages, list):
        raise BadRequest(f"'messages' must be a list, not {_kind(messages)}.", param="messages")
    return messages


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
