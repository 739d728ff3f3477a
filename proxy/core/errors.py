"""Everything that is said to a client or to an operator when something is refused or fails.

    KvlaneError
    ├── RequestError                       a client is answered; class = status = type and code
    │   ├── BadRequest                400  invalid_request_error
    │   │   ├── InvalidJson
    │   │   └── NoHttp                     it cannot be read, or not in one way only
    │   ├── Unauthorized              401  authentication_error
    │   ├── Forbidden                 403  permission_error
    │   ├── NotFound                  404  invalid_request_error
    │   │   ├── UnknownModel               model_not_found
    │   │   ├── UnknownResponse
    │   │   └── UnknownPod
    │   ├── MethodNotAllowed          405
    │   ├── BodyTimeout               408
    │   │   └── HeadTimeout
    │   ├── Conflict                  409  it cannot be done as things are
    │   ├── BodyTooLarge              413
    │   ├── HeadTooLarge              431  a line, a field or their number is beyond what is read
    │   ├── Saturated                 429  rate_limit_error: a filter that knows says that all are exhausted
    │   │   ├── QueueFull                  flow control has no room, now or in time
    │   │   │   ├── WaitedTooLong
    │   │   │   ├── TooLate
    │   │   │   ├── MadeRoom
    │   │   │   └── Evicted
    │   │   └── RateLimited                a key or a tenant has had its share
    │   ├── BadGateway                502  the pods did not answer
    │   │   └── AllFailed                  each that could be asked: none has begun
    │   ├── NoEndpoints               503  nobody can serve this
    │   │   └── ShuttingDown               kvlane is being stopped
    │   ├── SuspectedPoison           503  pods have died under this request
    │   ├── IssuerAway                503  whether a token is good only its issuer's keys could say
    │   ├── FileLimitReached          503  this process has no file descriptor left for a connection to a pod
    │   └── GatewayTimeout            504
    ├── UpstreamFailed                     one pod failed before its first byte: the next one may be tried
    │   ├── ConnectFailed
    │   │   ├── ConnectRefused
    │   │   ├── OutOfFiles                     this process has no file descriptor left; says nothing of the pod
    │   │   └── PassedOver                     whoever sends the request has gone on to another pod by himself
    │   ├── Declined                           it answered that it cannot
    │   │   └── RankOutOfRange                     it has fewer data-parallel ranks
    │   └── UpstreamTimedOut
    └── ConfigError                        all faults of a configuration, each with its path

A RequestError is raised where it is known and rendered once, in `openai.errors`, in the shape of the API called.
Messages name what to do and never name a pod's URL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from proxy.core.endpoint import Endpoint
    from proxy.core.request import InferenceRequest

LONGEST_NAME = 200
"""Characters of what a client made up that its error repeats."""


class Reason(Enum):
    """Why a request was refused: the value of x-kvlane-reason and, where llm-d has it, of its dropped-reason."""

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
    BODY_TOO_LARGE = "body-too-large"
    HEAD_TOO_LARGE = "head-too-large"
    NO_ENDPOINTS = "rejected-no-endpoints"
    SATURATED = "rejected-saturated"
    TTL_EXPIRED = "rejected-ttl-expired"
    DEADLINE = "rejected-deadline"
    EVICTED = "evicted-priority"
    DISPLACED = "evicted-queue-pressure"
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
        """llm-d's x-llm-d-request-dropped-reason, for refusals that it names too."""
        return self.value if self.value.startswith(("rejected-", "evicted-")) else None


class KvlaneError(Exception):
    """Root of everything kvlane raises on purpose."""


class RequestError(KvlaneError):
    """Answered to the client. `param` names the field of the body that is at fault."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_server_error"
    code: ClassVar[str | None] = None
    should_retry: ClassVar[bool | None] = None
    """What x-should-retry tells clients that would decide by the status; None: that is right."""
    reason: Reason = Reason.INTERNAL
    retry_after: float | None = None
    """Seconds until it is worth trying again, where that is known."""

    def __init__(self, message: str, *, param: str | None = None, reason: Reason | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if reason is not None:
            self.reason = reason


class BadRequest(RequestError):
    status = 400
    type = "invalid_request_error"
    reason = Reason.INVALID_REQUEST


class InvalidJson(BadRequest):
    code = "invalid_json"


class NoHttp(BadRequest):
    """Where the next request begins nobody knows, so its connection ends."""


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"
    reason = Reason.UNAUTHORIZED


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "forbidden"
    reason = Reason.FORBIDDEN


class MisdirectedRequest(RequestError):
    """The request names a host that this server does not serve."""

    status = 421
    type = "invalid_request_error"
    code = "misdirected_request"
    reason = Reason.MISDIRECTED


class NotFound(RequestError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"
    reason = Reason.UNKNOWN_PATH


class UnknownModel(NotFound):
    code = "model_not_found"
    reason = Reason.UNKNOWN_MODEL

    def __init__(self, model: str) -> None:
        shown = model if len(model) <= LONGEST_NAME else model[:LONGEST_NAME] + "…"
        super().__init__(f"The model `{shown}` does not exist; GET /v1/models lists those that do.", param="model")


class UnknownResponse(NotFound):
    reason = Reason.UNKNOWN_RESPONSE

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found; it may have expired.", param="response_id")


class UnknownPod(NotFound):
    code = "pod_not_found"
    reason = Reason.UNKNOWN_POD

    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"No pod is named '{name}'{hint}")


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"
    reason = Reason.METHOD_NOT_ALLOWED

    def __init__(self, message: str, allowed: Sequence[str]) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class BodyTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"
    reason = Reason.BODY_TIMEOUT


class HeadTimeout(BodyTimeout):
    """Of a request that has hardly begun."""


class Conflict(RequestError):
    status = 409
    type = "invalid_request_error"
    code = "conflict"
    reason = Reason.CONFLICT


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"
    reason = Reason.BODY_TOO_LARGE


class HeadTooLarge(RequestError):
    """As with NoHttp, its connection ends."""

    status = 431
    type = "invalid_request_error"
    code = "head_too_large"
    reason = Reason.HEAD_TOO_LARGE


class Saturated(RequestError):
    status = 429
    type = "rate_limit_error"
    code = "saturated"
    reason = Reason.SATURATED
    retry_after: float = 1.0


class QueueFull(Saturated):
    """Flow control lets it neither go on nor wait. `retry_after` is when there should be room."""

    code = "queue_full"


class WaitedTooLong(QueueFull):
    code = "queue_timeout"
    reason = Reason.TTL_EXPIRED


class TooLate(QueueFull):
    """It will not be served, or was not, by its deadline."""

    code = "deadline"
    reason = Reason.DEADLINE


class MadeRoom(QueueFull):
    """It waited, and another one has its place now."""

    code = "queue_full"
    reason = Reason.DISPLACED


class Evicted(QueueFull):
    """It was with a pod, which another one needed."""

    code = "evicted"
    reason = Reason.EVICTED


class RateLimited(Saturated):
    """A key or tenant has had what it may have. `retry_after` is when it may have more; `headers` say what is left."""

    code = "rate_limit_exceeded"
    reason = Reason.RATE_LIMITED

    def __init__(self, message: str, retry_after: float, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.headers = tuple(headers)


class BadGateway(RequestError):
    status = 502
    type = "server_error"
    code = "upstream_failed"
    reason = Reason.UPSTREAM_FAILED


class NoEndpoints(RequestError):
    status = 503
    type = "server_error"
    code = "no_endpoints"
    reason = Reason.NO_ENDPOINTS
    retry_after: float = 1.0


class AllFailed(BadGateway):
    """The request can be sent again: none of it has been lost, nothing of an answer has come."""


NO_POD = "No pod is ready; try again shortly."


class ShuttingDown(NoEndpoints):
    code = "shutting_down"
    reason = Reason.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__("The proxy is being stopped; try again shortly.")


class IssuerAway(RequestError):
    """No fault of the client, whose token may be good."""

    status = 503
    type = "server_error"
    code = "issuer_away"
    reason = Reason.ISSUER_AWAY
    retry_after: float = 10.0

    def __init__(self) -> None:
        super().__init__("The keys of the token's issuer cannot be had; try again shortly.")


class FileLimitReached(RequestError):
    """This process has no file descriptor left. Its pods are well."""

    status = 503
    type = "server_error"
    code = "out_of_files"
    reason = Reason.OUT_OF_FILES
    retry_after: float = 1.0

    def __init__(self) -> None:
        super().__init__("The proxy has reached its limit on open files. Retry shortly.")


class SuspectedPoison(RequestError):
    """Clients try a 503 again by themselves; this one says that they should not."""

    status = 503
    type = "server_error"
    code = "suspected_poison"
    reason = Reason.SUSPECTED_POISON
    should_retry = False

    def __init__(self, seconds: float) -> None:
        super().__init__(f"Pods have died under this request; it is not tried again for {seconds:.0f} s.")


class GatewayTimeout(RequestError):
    status = 504
    type = "server_error"
    code = "upstream_timed_out"
    reason = Reason.UPSTREAM_TIMED_OUT


class UpstreamFailed(KvlaneError):
    """A pod failed before the first byte of its answer. The message is for the log, not for the client."""

    broke_off: ClassVar[bool] = False
    """The pod had the request, and closed its connection without an answer."""


class Garbled(UpstreamFailed):
    """What the pod sent is not HTTP."""


class Disconnected(UpstreamFailed):
    """The pod closed the connection before its answer was whole. `silent`: before a byte of it."""

    broke_off = True

    def __init__(self, message: str, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class ConnectFailed(UpstreamFailed):
    """No connection to the pod came about: nothing of the request was sent."""


class ConnectRefused(ConnectFailed):
    """Nobody listens there."""


class OutOfFiles(ConnectFailed):
    """This process, or its machine, has no file descriptor left: says nothing of the pod."""


class PassedOver(ConnectFailed):
    """Whoever sends the request has tried others by himself: `then` has taken it, or nobody has."""

    def __init__(self, message: str, then: Endpoint | None) -> None:
        super().__init__(message)
        self.then = then


class CutShort(UpstreamFailed):
    """A part of its answer has reached the client; whoever is asked for the `rest` can go on with it."""

    broke_off = True

    def __init__(self, message: str, rest: InferenceRequest) -> None:
        super().__init__(message)
        self.rest = rest


class Declined(UpstreamFailed):
    """It answered, that it cannot or does not want to. `retry_after` are seconds, where it says so, `text` what it says
    of why."""

    def __init__(self, status: int, retry_after: float | None = None, text: str = "") -> None:
        super().__init__(f"it answered {status} {text[:200]}".rstrip())
        self.status = status
        self.retry_after = retry_after
        self.text = text


class RankOutOfRange(Declined):
    """The pod has `size` data-parallel ranks, and `rank`, which the request named, is none of them."""

    def __init__(self, rank: int, size: int, text: str) -> None:
        super().__init__(400, text=text)
        self.rank = rank
        self.size = size


class UpstreamTimedOut(UpstreamFailed):
    """The pod sent no first byte in time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a configuration: `path` as `scheduling.plugins[2].parameters.threshold`."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(KvlaneError):
    """All faults found, in the order of the file."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)


class Unreadable(ConfigError):
    """A file that is missing, or cannot be read now; a later attempt may succeed without a change of the file."""


def cause(error: Exception) -> str:
    """What went wrong, in the words of the system where it has some: those of libraries repeat the address."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    by_asyncio = error.strerror.startswith("Connect call failed")
    return os.strerror(error.errno) if by_asyncio and error.errno else error.strerror
