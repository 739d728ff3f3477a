"""The fields of a JSON body, read once, with the complaints of the engine's schema."""

from __future__ import annotations

import json
from typing import Any

import orjson

from proxy.lab.sim.api.errors import BadRequest, ValidationError, invalid

Body = dict[str, Any]


def parse(content_type: str, raw: bytes) -> Body:
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
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _decode_leniently(raw)


def _decode_leniently(raw: bytes) -> object:
    """As the engine's own parser does, which knows NaN and states where it stopped."""
    try:
        return json.loads(raw)
    except json.JSONDecodeError as error:
        context = f", 'ctx': {{'error': '{error.msg}'}}"
        raise invalid("json_invalid", f"body.{error.pos}", "JSON decode error", {}, context) from None
    except UnicodeDecodeError:
        raise ValidationError("There was an error parsing the body") from None


def required(body: Body, name: str) -> Any:
    if name not in body:
        raise invalid("missing", f"body.{name}", "Field required", body)
    return body[name]


def objects(body: Body, name: str) -> list[dict[str, Any]]:
    """A required list of objects."""
    items = required(body, name)
    if not isinstance(items, list):
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", items)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid("dict_type", f"body.{name}.{index}", "Input should be a valid dictionary", item)
    return items


def integer(body: Body, name: str, default: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        message = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", message, value)
    if not isinstance(value, int):
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    return value


def positive(body: Body, name: str, default: int) -> int:
    value = integer(body, name, default)
    if value < 1:
        raise BadRequest(f"{name} must be at least 1, got {value}. (parameter={name}, value={value})", name)
    return value


def flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid("bool_type", f"body.{name}", "Input should be a valid boolean", value)
    return bool(value)


def text(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return value


def strings(body: Body, name: str) -> tuple[str, ...]:
    """Nothing, one string, or a list of them."""
    value = body.get(name)
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, str) for item in items):
        raise invalid("string_type", f"body.{name}", "Input should be a valid string", value)
    return tuple(items)


def cache_salt(body: Body) -> str | None:
    salt = text(body, "cache_salt")
    if salt == "":
        message = "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)"
        raise BadRequest(message, "cache_salt")
    return salt


def check_temperature(body: Body) -> None:
    value = body.get("temperature")
    if isinstance(value, int | float) and value < 0:
        message = f"temperature must be non-negative, got {float(value)}."
        raise BadRequest(f"{message} (parameter=temperature, value={float(value)})", "temperature")
