"""Errors as the API that was called words them."""

from __future__ import annotations

import math
from typing import Any

import orjson

from proxy.core.errors import MethodNotAllowed, RateLimited, RequestError, Unauthorized

Rendered = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""

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
    """The answer to a refused request."""
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
    """A whole server-sent event that says that the stream was cut."""
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
    """What clients send may hold bytes that are no UTF-8, and JSON lone surrogates: neither can be written as it is."""
    return text.encode("utf-8", "backslashreplace").decode()


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"
