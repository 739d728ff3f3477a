"""The error with which an engine says that it does not have the model of a request."""

from __future__ import annotations

import re

import orjson

from proxy.openai.first_event import LONGEST

_MESSAGE = re.compile(r"\bmodel\b.*\b(?:does not exist|not found)\b", re.IGNORECASE | re.DOTALL).search


def says_that_model_is_missing(body: bytes) -> bool:
    """Return whether the body of a 404 is about the model. That of an unknown path, or of anything else, is not."""
    if len(body) > LONGEST:
        return False
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    error = fields.get("error", fields) if isinstance(fields, dict) else None
    if isinstance(error, str):
        return _MESSAGE(error) is not None
    if not isinstance(error, dict):
        return False
    return error.get("code") == "model_not_found" or _MESSAGE(str(error.get("message") or "")) is not None
