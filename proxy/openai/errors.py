"""Errors in the format of each API, and the interpretation of error responses of pods."""

from __future__ import annotations

import math
import re
import zlib
from contextlib import suppress
from typing import Any

import orjson

from proxy.core.errors import Declined, MethodNotAllowed, RankOutOfRange, RateLimited, RequestError, Unauthorized
from proxy.openai.events import EVENT_END, fields_of

Rendered = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers and body."""

ANTHROPIC_PATHS = "/v1/messages"
RESPONSES_PATHS = "/v1/responses"

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def render(error: RequestError, path: str, request_id: str) -> Rendered:
    headers = [
        ("content-type", "application/json"),
        ("x-request-id", request_id),
        ("x-kvlane-reason", error.reason.value),
    ]
    if dropped := error.reason.dropped_reason:
        headers.append(("x-llm-d-request-dropped-reason", dropped))
    if error.retry_after is not None:
        headers.append(("retry-after", str(math.ceil(error.retry_after))))
    if error.should_retry is not None:
        headers.append(("x-should-retry", "true" if error.should_retry else "false"))
    if isinstance(error, RateLimited):
        headers.extend(error.headers)
    if isinstance(error, Unauthorized):
        headers.append(("www-authenticate", "Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append(("allow", ", ".join(error.allowed)))
    return error.status, headers, orjson.dumps(_body(error, path, request_id))


def stream_error(path: str, message: str) -> bytes:
    """Return the error event of a stream that was cut."""
    if path.startswith(ANTHROPIC_PATHS):
        return _event("error", {"type": "error", "error": {"type": "api_error", "message": message}})
    if path.startswith(RESPONSES_PATHS):
        return _event("error", {"type": "error", "code": "server_error", "message": message, "param": None})
    fields = {"message": message, "type": "server_error", "param": None, "code": "upstream_failed"}
    return b"data: " + orjson.dumps({"error": fields}) + b"\n\n"


def _body(error: RequestError, path: str, request_id: str) -> dict[str, Any]:
    message = _writable(error.message)
    if path.startswith(ANTHROPIC_PATHS):
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": _writable(request_id)}
    fields = {"message": message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": fields}


def _writable(text: str) -> str:
    """Return the text without invalid UTF-8 and lone surrogates, which clients may send and which cannot be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


LONGEST = 8 * 1024
"""Bytes of a first event that are awaited. Errors are shorter."""

TOO_MANY_REQUESTS = 429
UNAVAILABLE = 503

ENDING = 2 * 1024
"""Bytes at the end of a response that have the finish reason of its last choice, and its usage."""

ABORTED = b'"finish_reason":"abort"'
"""In a response that vLLM does not finish because it stops. Text of the model has no unescaped quotes."""

_MESSAGE = re.compile(rb'"type"\s*:\s*"message"').search
_STOP_REASON = re.compile(rb'"stop_reason"\s*:\s*"').search

_NAMED_ERROR = re.compile(rb"event:[ \t]*error[ \t]*[\r\n]").match

_STATUSES = {
    "service unavailable": 503,
    "overloaded_error": 503,
    "rate_limit_error": TOO_MANY_REQUESTS,
    "api_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "internalservererror": 500,
    "server_error": 500,
}
"""Statuses of errors without one, by type or code in lower case."""


def starts_without_error(beginning: bytes) -> bool:
    """Return whether a stream starts with a complete event that certainly reports no error, as nearly all do;
    otherwise `declined` judges it."""
    end = beginning.find(b"\n\n", 0, LONGEST)
    # Not `in`, which takes 2,500 instructions: CPython raises and catches an error in it.
    return end >= 0 and beginning.find(b"error", 0, end) < 0 and beginning.find(ABORTED, -ENDING) < 0


def is_enough_to_judge(beginning: bytes) -> bool:
    """Return whether so much of the body has arrived that `declined` can judge it."""
    return len(beginning) > LONGEST or EVENT_END.search(beginning) is not None


def declined(beginning: bytes) -> Declined | None:
    """Return the error of a pod that declines the request; None if it serves it, or finds the request invalid."""
    end = EVENT_END.search(beginning)
    first = beginning if end is None else beginning[: end.start()]  # only the first event can decline
    if b"error" not in first[:LONGEST]:
        ending = 0 if beginning.startswith(b"{") else -ENDING  # a whole response may have its tokens behind
        return aborted() if ABORTED in beginning[ending:] else None
    fields = fields_of(first)
    error = fields.get("error")
    if error is None and (fields.get("type") == "error" or _NAMED_ERROR(beginning)):
        error = fields
    if not isinstance(error, dict):
        return None
    if (out_of_range := _rank_out_of_range(error)) is not None:
        return out_of_range
    status = _status(error)
    if status < 500 and status != TOO_MANY_REQUESTS:
        return None
    return Declined(status, text=str(error.get("message") or ""))


_OUT_OF_RANGE = re.compile(
    r"data[_ ]parallel[_ ]rank (\d{1,6}) is out of range (?:\[0, |for )(\d{1,6})(?:\)\.(?: None)?| engine\(s\))"
).fullmatch
"""The message of vLLM's Python server, to which some versions add the cause, and of its Rust server."""


def _rank_out_of_range(error: dict[str, Any]) -> RankOutOfRange | None:
    named = _OUT_OF_RANGE(text := str(error.get("message") or ""))
    if named is None or not (rank := int(named[1])) >= (size := int(named[2])) > 0:
        return None
    return RankOutOfRange(rank, size, text)


def names_rank_out_of_range(body: bytes) -> RankOutOfRange | None:
    """Return the data-parallel rank that the body of a 400 reports; None for another error."""
    return _rank_out_of_range(_error_of(body) or {})


def aborted() -> Declined:
    """Return the error that corresponds to a pod that broke off after a head with status 200."""
    return Declined(UNAVAILABLE, text="it aborted the response")


def is_aborted_message(body: bytes) -> bool:
    """Return whether this is a whole message without a stop reason, as vLLM sends it if it stops."""
    return body.startswith(b"{") and _MESSAGE(body) is not None and _STOP_REASON(body) is None


def _status(error: dict[str, Any]) -> int:
    code = error.get("code")
    if isinstance(code, int):
        return code
    if isinstance(code, str) and code.isdecimal():
        return int(code)
    return _STATUSES.get(str(code).lower(), 0) or _STATUSES.get(str(error.get("type")).lower(), 0)


_GZIP = b"\x1f\x8b"
_ANY_FORMAT = zlib.MAX_WBITS | 32
"""Window bits of zlib for both gzip and zlib."""

_MODEL = re.compile(r"\bmodel\b", re.IGNORECASE)
_MISSING = re.compile(r"\b(?:does not exist|not found)\b", re.IGNORECASE)


def says_that_model_is_missing(body: bytes) -> bool:
    """Return whether the body of a 404 is about the model instead of, for example, an unknown path. An unreadable body,
    such as a compressed one, counts as one: it may list models."""
    if body.startswith(_GZIP):
        with suppress(zlib.error):
            body = zlib.decompressobj(_ANY_FORMAT).decompress(body, LONGEST)
    text = body[:LONGEST].decode("utf-8", "replace")
    if "\ufffd" in text[:-1]:  # the last character may be cut off
        return True
    if (error := _error_of(body)) is None:
        return _says_so(text)
    return error.get("code") == "model_not_found" or _says_so(str(error.get("message") or error.get("detail") or ""))


def _says_so(text: str) -> bool:
    model = _MODEL.search(text)
    return model is not None and _MISSING.search(text, model.end()) is not None


def _error_of(body: bytes) -> dict[str, Any] | None:
    """Return the fields of the error that is all of a body; empty without an error. None for a body that is too long,
    or no JSON."""
    if len(body) > LONGEST:
        return None
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = fields.get("error", fields) if isinstance(fields, dict) else None
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}
