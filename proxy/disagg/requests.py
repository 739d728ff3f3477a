"""The bodies of requests of the stages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from proxy.core.errors import BadRequest
from proxy.openai.bodies import object_in, with_long_integers
from proxy.openai.parse import TOO_DEEP

KV_TRANSFER = b'"kv_transfer_params"'
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
SPLIT_PATHS = (CHAT, COMPLETIONS, RESPONSES, "/v1/messages")
"""APIs whose prompt and response can be computed on two pods."""

TRANSFER = "ec_transfer_params"
"""Field with the embeddings, in responses of encode pods and in requests of the next stage."""

_KINDS = ("image_url", "video_url", "audio_url", "input_audio", "image_embeds")

_OF_THE_TRANSPORT = ("kv_transfer_params", "stream_options", "background")
"""Fields about the transport of the response."""

_OF_THE_RESPONSE = frozenset(
    (*_OF_THE_TRANSPORT, "logprobs", "top_logprobs", "structured_outputs", "stop", "stop_sequences")
)
"""Fields without an effect on the prompt, which a prefill pod does not need. `response_format` has one: some chat
templates write it into the prompt."""


def fields_of_pod(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a pod's JSON object; None for anything else, or nested too deeply to be written."""
    fields = object_in(body)
    try:
        json_of(fields or {})
    except BadRequest:
        return None
    return fields


def why_whole(path: str, fields: dict[str, Any], generates_first_token: bool = False) -> str:
    """Return why one pod must serve the request, as a label of the metrics; empty if two can. `generates_first_token`
    as connectors have it."""
    if path not in SPLIT_PATHS:
        return "other-api"
    if fields.get("n") not in (None, 1) or fields.get("best_of") not in (None, 1) or fields.get("use_beam_search"):
        return "several-choices"
    if fields.get("prompt_logprobs") is not None or fields.get("echo"):
        return "prompt-tokens-told"
    if path == COMPLETIONS and not _is_one_prompt(fields.get("prompt")):
        return "several-prompts"
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto") and not generates_first_token:
        return "forced-tool"  # a call takes more than one token, and vLLM finds no call in its first one
    return ""


def for_prefill(path: str, fields: dict[str, Any], extra: dict[str, Any], generates_first_token: bool = False) -> bytes:
    """Return a body with the same prompt, for one token without a stream, and the fields of the connector."""
    dropped = _OF_THE_TRANSPORT if generates_first_token else _OF_THE_RESPONSE
    body = {name: value for name, value in fields.items() if name not in dropped}
    body["stream"] = False
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        del body["thinking"]  # its budget is more than one token
    if path == RESPONSES:
        body["max_output_tokens"] = 1
        body["store"] = False  # no client could retrieve it
    else:
        body["max_tokens"] = 1
        if path != COMPLETIONS:
            body["max_completion_tokens"] = 1
    if "min_tokens" in body or (path in (CHAT, COMPLETIONS) and not generates_first_token):
        body["min_tokens"] = 1  # engines keep nothing of a prompt whose response ends at once
    return json_of({**body, **extra})


def with_fields(body: bytes, extra: dict[str, Any]) -> bytes:
    """Return the client's bytes with fields added at the end, without transfer parameters of the client. A body in
    UTF-16 or UTF-32 becomes UTF-8."""
    if b"\0" in body[:4]:
        body = json_of(object_in(body) or {})
    if KV_TRANSFER in body:
        body = without_transfer(body)
    if not extra:
        return body
    trimmed = body.rstrip()
    inside = trimmed[:-1].rstrip()
    comma = b"" if inside.endswith(b"{") else b","
    return inside + comma + json_of(extra)[1:-1] + b"}"


def without_transfer(body: bytes) -> bytes:
    """Remove transfer parameters, by which a client could stop a pod's engine."""
    fields = object_in(body)
    if fields is None or "kv_transfer_params" not in fields:
        return body
    fields = with_long_integers(fields, body)
    return json_of({name: value for name, value in fields.items() if name != "kv_transfer_params"})


def json_of(fields: dict[str, Any]) -> bytes:
    """Raise BadRequest for nesting that cannot be serialised."""
    try:
        return orjson.dumps(fields)
    except TypeError:  # an integer of more than 64 bits, or 255 levels
        try:
            return json.dumps(fields).encode()
        except RecursionError:
            raise BadRequest(TOO_DEEP) from None


def _is_one_prompt(prompt: Any) -> bool:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return True
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(token, int) for token in prompt)


# Media.


def encode_bodies(path: str, fields: dict[str, Any]) -> list[bytes]:
    """Return a body for each different medium, without the text around it."""
    if path != CHAT:
        return []
    shared: dict[str, Any] = {name: fields[name] for name in ("model", "mm_processor_kwargs") if name in fields}
    parts = {json_of(part): part for part in _media(fields.get("messages"))}
    return [
        json_of(
            {
                **shared,
                "messages": [{"role": "user", "content": [part]}],
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "stream": False,
            }
        )
        for part in parts.values()
    ]


def merged(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields for the next request; empty where engines find embeddings by the digests of the media."""
    found: dict[str, Any] = {}
    for response in responses:
        if isinstance(params := response.get(TRANSFER), dict) and is_flat(params):
            found |= params
    return {TRANSFER: found} if found else {}


def is_flat(fields: dict[str, Any]) -> bool:
    """Return whether orjson can serialise this inside another object."""
    try:
        orjson.dumps([[[fields]]])
    except TypeError:
        return False
    return True


def _media(messages: Any) -> Iterator[dict[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in _KINDS:
                yield part
