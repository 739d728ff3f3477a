"""Refusals in the words of vLLM.

ApiError
├── ValidationError     400, type "Bad Request": what a schema would find
├── BadRequest          400, type "BadRequestError": what only the engine can find
├── NotFound            404
├── Unavailable         503: the queue is full
├── Loading             503: not yet
├── EngineGone          500: the engine has ended before its server
├── EngineDead          500: it has ended by itself
├── EngineFailed        500: this request has
└── NoRoute             404, 405: {"detail": …}
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson


class ApiError(Exception):
    """Rendered as {"error": {...}}; on /v1/messages in Anthropic's shape."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def openai(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})

    def anthropic(self) -> bytes:
        return orjson.dumps({"type": "error", "error": {"type": self.type, "message": self.message}})


class ValidationError(ApiError):
    """Has OpenAI's shape on every path."""

    type = "Bad Request"

    def anthropic(self) -> bytes:
        return self.openai()


class BadRequest(ApiError):
    pass


class NotFound(ApiError):
    status = 404
    type = "NotFoundError"


class Unavailable(ApiError):
    status = 503
    type = "Service Unavailable"


class Loading(Unavailable):
    def __init__(self) -> None:
        super().__init__("The model is being loaded.")


class EngineGone(ApiError):
    status = 500
    type = "InternalServerError"

    def __init__(self) -> None:
        super().__init__("cannot schedule new futures after shutdown")


class EngineDead(ApiError):
    status = 500
    type = "InternalServerError"

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class EngineFailed(ApiError):
    status = 500
    type = "InternalServerError"

    def __init__(self) -> None:
        super().__init__("Internal server error")


class NoRoute(ApiError):
    """`allow`: the methods that the path knows; none means that nobody knows the path."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self.allow = sorted(allow)
        self.status = 405 if self.allow else 404
        super().__init__("Method Not Allowed" if self.allow else "Not Found")

    def openai(self) -> bytes:
        return orjson.dumps({"detail": self.message})

    def anthropic(self) -> bytes:
        return self.openai()


def invalid(kind: str, where: str, message: str, value: object, context: str = "") -> ValidationError:
    """One finding of the schema at `where`, such as "body.messages"."""
    finding = f"{{'type': '{kind}', 'loc': '{where}', 'msg': '{message}', 'input': '{_shape(value)}'{context}}}"
    return ValidationError(f"1 validation error:\n  {finding}", where)


def _shape(value: object) -> str:
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def unknown_model(name: str, base: str) -> NotFound:
    return NotFound(f"The model `{name}` does not exist. Valid aliases: {base}.", "model")


def too_long(tokens: int, limit: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {tokens} input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={tokens})",
        "input_tokens",
    )


def busy() -> Unavailable:
    return Unavailable(
        "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance."
    )
