"""Errors: for clients (RequestError), of pods (UpstreamFailed) and of configurations (ConfigError).

A RequestError is raised where it is known and rendered once, in `openai.errors`, in the shape of the API called.
Messages say what to do and never contain the URL of a pod.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from proxy.core.attempt import Attempt
    from proxy.core.endpoint import Endpoint
    from proxy.core.request import InferenceRequest

LONGEST_NAME = 200
"""Largest number of characters of a client's input that an error repeats."""


class Reason(Enum):
    """Why a request was refused: the value of x-kvlane-reason, and of llm-d's dropped-reason where llm-d defines it.
    How an attempt ended is an `Ending`, which also has the value upstream-failed."""

    INVALID_REQUEST = "invalid-request"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    MISDIRECTED = "misdirected-request"
    UNKNOWN_PATH = "unknown-path"
    UNKNOWN_MODEL = "unknown-model"
    UNKNOWN_RESPONSE = "unknown-response"
    UNKNOWN_POD = "unknown-pod"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    BODY_TIMEOUT = "body-timeout"
    CONFLICT = "conflict"
    NOT_CACHED = "not-cached"
    BODY_TOO_LARGE = "body-too-large"
    HEAD_TOO_LARGE = "head-too-large"
    NO_ENDPOINTS = "rejected-no-endpoints"
    SATURATED = "rejected-saturated"
    TTL_EXPIRED = "rejected-ttl-expired"
    DEADLINE = "rejected-deadline"
    EVICTED_PRIORITY = "evicted-priority"
    EVICTED_QUEUE_PRESSURE = "evicted-queue-pressure"
    RATE_LIMITED = "rate-limited"
    SHUTTING_DOWN = "rejected-shutting-down"
    SUSPECTED_POISON = "suspected-poison"
    ISSUER_AWAY = "issuer-away"
    OUT_OF_FILES = "out-of-files"
    UPSTREAM_FAILED = "upstream-failed"
    UPSTREAM_TIMED_OUT = "upstream-timed-out"
    INTERNAL = "internal-error"

    @property
    def dropped_reason(self) -> str | None:
        """The value of llm-d's x-llm-d-request-dropped-reason, for the refusals that llm-d defines."""
        return self.value if self.value.startswith(("rejected-", "evicted-")) else None


class KvlaneError(Exception):
    """The base of all errors that kvlane raises deliberately."""


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "internal_server_error"}
"""Type of an error by its status; others are invalid requests below 500 and errors of the server above."""


class RequestError(KvlaneError):
    """An error for the client. `param` names the invalid field of the body."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = _TYPES[500]
    code: ClassVar[str | None] = None
    should_retry: ClassVar[bool | None] = None
    """The value of x-should-retry, for clients that would decide by the status; None: the status is sufficient."""
    reason: Reason = Reason.INTERNAL
    retry_after: float | None = None
    """Seconds after which a retry may succeed, if known."""

    def __init_subclass__(cls, **attributes: Any) -> None:
        """Set class attributes, as in `class Conflict(RequestError, status=409)`."""
        super().__init_subclass__()
        if (status := attributes.get("status")) is not None:
            cls.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        for name, value in attributes.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, param: str | None = None, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if reason is not None:
            self.reason = reason


class BadRequest(RequestError, status=400, reason=Reason.INVALID_REQUEST):
    pass


class InvalidJson(BadRequest, code="invalid_json"):
    pass


class InvalidHttp(BadRequest):
    """Invalid HTTP. The start of the next request is unknown, so the connection is closed."""


class Unauthorized(RequestError, status=401, code="invalid_api_key", reason=Reason.UNAUTHORIZED):
    pass


class Forbidden(RequestError, status=403, code="forbidden", reason=Reason.FORBIDDEN):
    pass


class MisdirectedRequest(RequestError, status=421, code="misdirected_request", reason=Reason.MISDIRECTED):
    """The request names a host that this server does not serve."""


class NotFound(RequestError, status=404, code="not_found", reason=Reason.UNKNOWN_PATH):
    pass


def _shown(name: str) -> str:
    """Return the start of a name that a client has sent."""
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "…"


class UnknownModel(NotFound, code="model_not_found", reason=Reason.UNKNOWN_MODEL):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model `{_shown(model)}` does not exist; GET /v1/models lists the models that do.", param="model"
        )


class UnknownResponse(NotFound, reason=Reason.UNKNOWN_RESPONSE):
    def __init__(self, response_id: str) -> None:
        super().__init__(
            f"Response with id '{_shown(response_id)}' not found; it may have expired.", param="response_id"
        )


class UnknownPod(NotFound, code="pod_not_found", reason=Reason.UNKNOWN_POD):
    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"No pod is named '{name}'{hint}")


class MethodNotAllowed(RequestError, status=405, code="method_not_allowed", reason=Reason.METHOD_NOT_ALLOWED):
    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class BodyTimeout(RequestError, status=408, code="body_timeout", reason=Reason.BODY_TIMEOUT):
    pass


class HeadTimeout(BodyTimeout):
    """A request whose head did not arrive in time."""


class Conflict(RequestError, status=409, code="conflict", reason=Reason.CONFLICT):
    pass


class NotCached(RequestError, status=412, code="not_cached", reason=Reason.NOT_CACHED):
    """The client wants a response only from a pod that has cached the start of the prompt."""


class BodyTooLarge(RequestError, status=413, code="body_too_large", reason=Reason.BODY_TOO_LARGE):
    pass


class HeadTooLarge(RequestError, status=431, code="head_too_large", reason=Reason.HEAD_TOO_LARGE):
    """A request head over the limit. The connection is closed."""


class Saturated(RequestError, status=429, code="saturated", reason=Reason.SATURATED):
    retry_after: float = 1.0


class FlowControlRefusal(Saturated):
    """A refusal of flow control: the request was not queued, left the queue without a pod, was aborted on its pod, or
    was shed. `retry_after` is the expected time until there is capacity, if it is known."""


class QueueFull(FlowControlRefusal, code="queue_full"):
    """The queue is full, and the request displaces no other."""


class Shed(FlowControlRefusal, code="queue_full"):
    """`flowControl.shedding` refuses the request because of its negative priority. Clients know the code of a full
    queue, and handle both in the same way."""


class WaitedTooLong(FlowControlRefusal, code="queue_timeout", reason=Reason.TTL_EXPIRED):
    pass


class NoPodInTime(FlowControlRefusal, status=503, code="no_endpoints", reason=Reason.NO_ENDPOINTS):
    """The request waited for the first ready pod of the pool."""


class DeadlineExceeded(FlowControlRefusal, code="deadline", reason=Reason.DEADLINE):
    """The deadline of the request, or its objective, has passed or cannot be met."""


class Displaced(FlowControlRefusal, code="queue_full", reason=Reason.EVICTED_QUEUE_PRESSURE):
    """A more urgent request, or one of a tenant with fewer queued requests, took its place in the full queue."""


class Evicted(FlowControlRefusal, code="evicted", reason=Reason.EVICTED_PRIORITY):
    """The request was aborted on a pod in favour of another one."""


class RateLimited(RequestError, status=429, code="rate_limit_exceeded", reason=Reason.RATE_LIMITED):
    """A key or tenant has reached a limit. `retry_after` is the time until the next request; `headers` report the rest.
    Not Saturated: another model or pool cannot help."""

    retry_after: float

    def __init__(self, message: str, retry_after: float, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = tuple(headers)


class BadGateway(RequestError, status=502, code="upstream_failed", reason=Reason.UPSTREAM_FAILED):
    """The error for the client when no other pod can be tried after an `UpstreamFailed`."""


class NoEndpoints(RequestError, status=503, code="no_endpoints", reason=Reason.NO_ENDPOINTS):
    retry_after: float = 1.0


class AllFailed(BadGateway):
    """All attempts failed before a response started, so the client can send the request again."""


class LastSaturated(AllFailed, status=429, code="saturated", reason=Reason.SATURATED):
    """The last pod that was tried responded with 429. Not Saturated, because attempts were made: callers treat it like
    any failure of all attempts. `retry_after` is the pod's, if it sent one."""

    retry_after: float = 1.0


class EnvoySaturated(RequestError, status=429, code="saturated", reason=Reason.SATURATED, retry_after=1.0):
    """A circuit breaker of Envoy is open. Not Saturated: Envoy does not send the request again, so another model cannot
    help."""

    def __init__(self) -> None:
        super().__init__("A circuit breaker of Envoy is open: it has too many requests; retry shortly.")


class FewerRanks(RequestError, status=503, code="no_endpoints", reason=Reason.NO_ENDPOINTS, retry_after=1.0):
    """The pod does not have the data-parallel rank. Not NoEndpoints: Envoy does not send the request again."""

    def __init__(self) -> None:
        super().__init__("The pod has fewer data-parallel ranks than it was known to have; retry shortly.")


NO_POD = "No pod is ready. Retry shortly."


class ShuttingDown(RequestError, status=503, code="shutting_down", reason=Reason.SHUTTING_DOWN, retry_after=1.0):
    """This process stops. Not NoEndpoints: another model or pool cannot help."""

    def __init__(self) -> None:
        super().__init__("The proxy is shutting down. Retry shortly.")


class IssuerUnreachable(RequestError, status=503, code="issuer_away", reason=Reason.ISSUER_AWAY, retry_after=10.0):
    """The keys of the token's issuer are unavailable; the token may be valid."""

    def __init__(self) -> None:
        super().__init__("Could not fetch the issuer's JWKS; retry shortly.")


class FileLimitReached(RequestError, status=503, code="out_of_files", reason=Reason.OUT_OF_FILES, retry_after=1.0):
    """This process or its machine has no free file descriptor; the pods may be healthy."""

    def __init__(self) -> None:
        super().__init__("The proxy has no free file descriptor. Retry shortly.")


class SuspectedPoison(
    RequestError, status=503, code="suspected_poison", reason=Reason.SUSPECTED_POISON, should_retry=False
):
    """The request is quarantined. Clients retry a 503 by themselves, so this one tells them not to."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"Pods crashed while serving this request. It is refused for {math.ceil(seconds)} s.")


class GatewayTimeout(RequestError, status=504, code="upstream_timed_out", reason=Reason.UPSTREAM_TIMED_OUT):
    pass


class UpstreamFailed(KvlaneError):
    """An attempt failed and another pod can be tried; `BadGateway` is the error for the client if none can. The message
    is internal and is never sent to the client."""

    may_have_crashed: ClassVar[bool] = False
    """Whether the pod stopped before its response was complete, as pods that crash do."""
    attempt: Attempt | None = None
    """The attempt that failed, if it is another one than the caller sent: a hedged one."""


class InvalidResponse(UpstreamFailed):
    """The response of the pod is not valid HTTP."""


class Disconnected(UpstreamFailed):
    """The pod closed the connection before its response was complete. `silent`: before its first byte."""

    may_have_crashed = True

    def __init__(self, message: str, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class ConnectFailed(UpstreamFailed):
    """No connection to the pod was established, so nothing of the request was sent."""


class ConnectRefused(ConnectFailed):
    """No process listens on the port."""


class OutOfFiles(ConnectFailed):
    """This process or its machine has no free file descriptor. The pod is not at fault."""


class TriedByEnvoy(ConnectFailed):
    """Envoy, in front of kvlane, has tried other pods itself: `then` serves the request, or no pod does."""

    def __init__(self, message: str, then: Endpoint | None) -> None:
        super().__init__(message)
        self.then = then


class EnvoyOverflow(ConnectFailed):
    """A circuit breaker of Envoy, in front of kvlane, is open: it has as many requests as it permits itself. The pod is
    not at fault."""


class StreamInterrupted(UpstreamFailed):
    """The stream was interrupted after a part had reached the client. Another pod can continue it with the request
    `rest`."""

    may_have_crashed = True

    def __init__(self, message: str, rest: InferenceRequest) -> None:
        super().__init__(message)
        self.rest = rest


SERVER_ERROR = 500
"""The lowest HTTP status of a failure of a server."""


class Declined(UpstreamFailed):
    """The pod sent an error response. `retry_after` are its seconds, if given; `text` is its explanation."""

    def __init__(self, status: int, retry_after: float | None = None, text: str = "") -> None:
        super().__init__(f"it responded with {status} {text[:200]}".rstrip())
        self.status = status
        self.retry_after = retry_after
        self.text = text

    @property
    def is_failure(self) -> bool:
        """Whether the pod failed; with another status, such as 429, it declines only this request."""
        return self.status >= SERVER_ERROR


class RankOutOfRange(Declined):
    """The request named the data-parallel `rank` of a pod that has `size` ranks."""

    def __init__(self, rank: int, size: int, text: str) -> None:
        super().__init__(400, text=text)
        self.rank = rank
        self.size = size


class UpstreamTimedOut(UpstreamFailed):
    """A limit on time other than `timeouts.connect`, which raises ConnectFailed, passed before the response was
    complete. If another pod can continue the stream, StreamInterrupted replaces it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration; `path` is written as `scheduling.plugins[2].parameters.threshold`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class MissingPackage(Problem):
    """A plugin whose package is not installed."""

    __slots__ = ()


class ConfigError(KvlaneError):
    """All faults of a configuration, in the order of the file. `hint` says what may help with all of them."""

    def __init__(self, problems: Sequence[Problem], hint: str = "") -> None:
        super().__init__("\n".join([*map(str, problems), *([hint] if hint else [])]))
        self.problems = tuple(problems)
        self.hint = hint

    def in_file_of(self, setting: str) -> ConfigError:
        """Return the error with its faults, which have the path of a file, below the setting that names the file."""
        return type(self)([Problem(setting, str(problem)) for problem in self.problems])


def without_extra(path: str, extra: str, package: str = "") -> ConfigError:
    """Return the error for a setting, or the plugin of this path, that needs an extra which is not installed."""
    needs = f"the package {package}" if package else "the extra"
    has_pip = importlib.util.find_spec("pip") is not None  # environments that uv makes have none
    install = f"{sys.executable} -m pip install" if has_pip else f"uv pip install --python {sys.executable}"
    return ConfigError([MissingPackage(path, f"needs {needs}: {install} 'kvlane[{extra}]'")])


class Unreadable(ConfigError):
    """A file that is missing or cannot be read now. A later attempt may succeed without a change of the file."""


def cause(error: Exception) -> str:
    """Return the reason of an error in the words of the operating system, if it has any: libraries repeat the
    address."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    by_asyncio = error.strerror.startswith("Connect call failed")
    return os.strerror(error.errno) if by_asyncio and error.errno else error.strerror
