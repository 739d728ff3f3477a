"""The fields of a JSON body, and the errors that vLLM returns for bad ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeVar

import orjson
from xxhash import xxh3_64_intdigest

T = TypeVar("T")

Json = dict[str, Any]

BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
LOADING = "The model is being loaded."
ENGINE_GONE = "cannot schedule new futures after shutdown"
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
ENGINE_FAILED = "Internal server error"


class SimError(Exception):
    """An error response, rendered as {"error": {...}}; on /v1/messages in Anthropic's shape."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, type: str = "BadRequestError"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.type = type

    def openai(self) -> Json:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def anthropic(self) -> Json:
        return {"type": "error", "error": {"type": self.type, "message": self.message}}


class ValidationError(SimError):
    """A violation of the schema; it has OpenAI's shape on every path."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, type="Bad Request")

    def anthropic(self) -> Json:
        return self.openai()


def unavailable(message: str) -> SimError:
    return SimError(message, status=503, type="Service Unavailable")


def internal(message: str) -> SimError:
    return SimError(message, status=500, type="InternalServerError")


def invalid(kind: str, where: str, message: str, value: object, context: str = "") -> ValidationError:
    """Return the error for one finding of the schema at `where`, such as "body.messages"."""
    shape = f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, dict | list) else value
    finding = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{message}', 'input': '{shape}'{context}}}"
    return ValidationError(f"1 validation error:\n  {finding}", where)


def unknown_model(name: str, base: str) -> SimError:
    message = f"The model `{name}` does not exist. Valid aliases: {base}."
    return SimError(message, "model", status=404, type="NotFoundError")


def too_long(tokens: int, limit: int) -> SimError:
    return SimError(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={tokens})",
        "input_tokens",
    )


def parse(content_type: str, raw: bytes) -> Json:
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ValidationError("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    if not raw:
        raise invalid("missing", "body", "Field required", None)
    body = _decode(raw)
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, body)
    return body


def _decode(raw: bytes) -> object:
    """Decode JSON. The engine's own parser accepts NaN and reports the position of an error."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(raw)
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        context = f", 'ctx': {{'error': '{error.msg}'}}"
        raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error", {}, context) from None
    except UnicodeDecodeError:
        raise ValidationError("There was an error parsing the body") from None


def required(body: Json, name: str) -> Any:
    if name not in body:
        raise invalid("missing", f"body.{name}", "Field required", body)
    return body[name]


def objects(body: Json, name: str) -> list[dict[str, Any]]:
    items = required(body, name)
    if not isinstance(items, list):
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", items)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid("dict_type", f"body.{name}.{index}", "Input should be a valid dictionary", item)
    return items


def integer(body: Json, name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, value)
    if not isinstance(value, int):
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    return value


def positive(body: Json, name: str, default: int) -> int:
    value = integer(body, name, default)
    if value < 1:
        raise SimError(f"{name} must be at least 1, got {value}. (parameter={name}, value={value})", name)
    return value


def flag(body: Json, name: str) -> bool:
    return bool(_typed(body, name, bool, "bool_type", "Input should be a valid boolean"))


def text(body: Json, name: str) -> str | None:
    return _typed(body, name, str, "string_type", "Input should be a valid string")


def _typed(body: Json, name: str, wanted: type[T], kind: str, message: str) -> T | None:
    value = body.get(name)
    if value is not None and not isinstance(value, wanted):
        raise invalid(kind, f"body.{name}", message, value)
    return value


def strings(body: Json, name: str) -> tuple[str, ...]:
    """Return the strings of a field: missing, one string, or a list of strings."""
    value = body.get(name)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, str) for item in items):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return tuple(items)


def cache_salt(body: Json) -> str | None:
    salt = text(body, "cache_salt")
    if salt == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
        raise SimError(message, "cache_salt")
    return salt


def check_temperature(body: Json) -> None:
    value = body.get("temperature")
    if isinstance(value, int | float) and value < 0:
        message = f"temperature must be non-negative, got {float(value)}."
        raise SimError(f"{message} (parameter=temperature, value={float(value)})", "temperature")


KINDS = frozenset({"image_url", "image", "input_image", "video_url", "audio_url", "input_audio"})
"""Types of content parts, in all APIs."""


def media_in(body: Json) -> tuple[int, ...]:
    """Return a hash of each medium, in order."""
    return tuple(
        xxh3_64_intdigest(orjson.dumps(part, option=orjson.OPT_SORT_KEYS))
        for messages in (body.get("messages"), body.get("input"))
        if isinstance(messages, list)
        for message in messages
        if isinstance(message, dict)
        for part in _parts(message.get("content"))
    )


def _parts(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, list):
        yield from (part for part in content if isinstance(part, dict) and part.get("type") in KINDS)
