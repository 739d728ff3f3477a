"""What spans say, in the words of OpenTelemetry's conventions for generative AI and HTTP. Never prompts."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.ports import Call
from proxy.core.request import InferenceRequest
from proxy.telemetry.labels import path_label

Attributes = dict[str, str | int | float | bool]

OPERATIONS: Mapping[str, str] = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""`gen_ai.operation.name` by the label of the path; what has none there is called by its label."""

FIRST_ERROR = 400
LOST = frozenset((Ending.UPSTREAM_FAILED, Ending.TIMED_OUT, Ending.EVICTED))


def operation(path: str) -> str:
    label = path_label(path)
    return OPERATIONS.get(label, label)


def name_of(path: str, model: str) -> str:
    return f"{operation(path)} {model}".rstrip()


def of_request(request: InferenceRequest) -> Attributes:
    found: Attributes = {
        "gen_ai.operation.name": operation(request.path),
        "gen_ai.request.model": request.model,
        "gen_ai.request.stream": request.stream,
    }
    if request.max_tokens:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    if request.tenant:
        found["kvlane.tenant"] = request.tenant
    return found


def of_end(call: Call, status: int, outcome: Ending | Reason, attempt: Attempt | None) -> Attributes:
    """Of the span of a whole request."""
    found: Attributes = {
        "http.request.method": call.method,
        "url.path": call.path,
        "http.response.status_code": status,
        "kvlane.request_id": call.id,
        "kvlane.outcome": outcome.value,
    }
    if attempt is not None:
        found["kvlane.endpoint"] = attempt.endpoint.name
        found["kvlane.attempts"] = attempt.number + 1
        found |= of_usage(attempt.usage)
        found |= _of_first_chunk(attempt, call.received_at)
    return found | _error(outcome, status)


def of_decision(request: InferenceRequest, candidates: int, decision: Decision) -> Attributes:
    found: Attributes = {
        "kvlane.candidates": candidates,
        "kvlane.endpoint": decision.target.name,
        "kvlane.prompt_tokens_estimated": request.prompt.tokens,
    }
    if decision.profile:
        found["kvlane.profile"] = decision.profile
    if decision.prefill:
        found["kvlane.prefill_endpoint"] = decision.prefill[0].name
    if decision.why:
        found["kvlane.stages"] = decision.why
    return found


def of_leg(attempt: Attempt) -> Attributes:
    """As it begins."""
    return {
        **of_request(attempt.request),
        **of_pod(attempt.endpoint),
        "kvlane.stage": attempt.stage.value,
        "kvlane.attempt": attempt.number,
    }


def of_pod(endpoint: Endpoint) -> Attributes:
    parts = urlsplit(endpoint.url)
    found: Attributes = {
        "gen_ai.provider.name": endpoint.engine,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "kvlane.endpoint": endpoint.name,
    }
    if endpoint.role:
        found["kvlane.role"] = endpoint.role
    return found


def of_leg_end(attempt: Attempt) -> Attributes:
    found = of_usage(attempt.usage)
    if attempt.status is not None:
        found["http.response.status_code"] = attempt.status
    if attempt.predicted_cached_tokens is not None:
        found["kvlane.predicted_cached_tokens"] = attempt.predicted_cached_tokens
    found |= _of_first_chunk(attempt, attempt.started_at)
    return found | _error(attempt.ending or Ending.COMPLETE, attempt.status or 0)


def _of_first_chunk(attempt: Attempt, since: float) -> Attributes:
    """In seconds; of streams alone, as the convention wants it: what comes whole comes when all of it is ready."""
    if attempt.first_byte_at is None or not attempt.request.stream:
        return {}
    return {"gen_ai.response.time_to_first_chunk": attempt.first_byte_at - since}


def of_usage(usage: Usage | None) -> Attributes:
    if usage is None:
        return {}
    found: Attributes = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    return found


def _error(outcome: Ending | Reason, status: int) -> Attributes:
    """An answer that is whole may be an error of the pod's."""
    if outcome is not Ending.COMPLETE:
        return {"error.type": outcome.value}
    return {"error.type": str(status)} if status >= FIRST_ERROR else {}
