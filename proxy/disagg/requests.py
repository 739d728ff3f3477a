"""The requests of the stages: their bodies, and the attempts whose responses are for the next attempt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadGateway, BadRequest, GatewayTimeout, SuspectedPoison, UpstreamFailed
from proxy.core.ports import Clock, Random, Relay, Reserve
from proxy.core.request import changed
from proxy.core.tasks import Tasks
from proxy.disagg.connector import Connector
from proxy.disagg.connectors import connector_named
from proxy.disagg.settings import DisaggregationSettings
from proxy.fleet.ledger import Ledger
from proxy.openai.parse import TOO_DEEP
from proxy.reliability.failover import Failover
from proxy.telemetry.metrics import Counter

KV_TRANSFER = b'"kv_transfer_params"'
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"
SPLIT_PATHS = (CHAT, COMPLETIONS, RESPONSES, "/v1/messages")
"""APIs of which a prompt and its answer can be computed on two pods."""

TRANSFER = "ec_transfer_params"
"""Where the embeddings are, in answers of encode pods and in requests to those that need them."""

_KINDS = ("image_url", "video_url", "audio_url", "input_audio", "image_embeds")

_OF_THE_TRANSPORT = ("kv_transfer_params", "stream_options", "background")
"""What comes at once says nothing of a prompt that is computed later."""

_ONLY_FOR_ANSWERS = frozenset((*_OF_THE_TRANSPORT, "logprobs", "top_logprobs", "structured_outputs", "stop"))
"""What says nothing of the prompt; a pod that makes one token of it for nobody needs none of them. `response_format` is
none: some models are told of it in their prompts."""


def fields_of(body: bytes) -> dict[str, Any] | None:
    """Of a JSON object; None if it is none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            return None
    return fields if isinstance(fields, dict) else None


def fields_of_pod(body: bytes) -> dict[str, Any] | None:
    """Of a pod's JSON object; None if it is none, or is nested too deeply to be passed on."""
    fields = fields_of(body)
    try:
        json_of(fields or {})
    except BadRequest:
        return None
    return fields


def why_whole(path: str, fields: dict[str, Any], begins_answer: bool = False) -> str:
    """Why the request must be answered by one pod, in a word for the metrics; empty if it need not. `begins_answer` as
    connectors have it."""
    if path not in SPLIT_PATHS:
        return "other-api"
    if fields.get("n") not in (None, 1) or fields.get("best_of") not in (None, 1) or fields.get("use_beam_search"):
        return "several-choices"
    if fields.get("prompt_logprobs") is not None or fields.get("echo"):
        return "prompt-tokens-told"
    if path == COMPLETIONS and not _is_one_prompt(fields.get("prompt")):
        return "several-prompts"
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto") and not begins_answer:
        return "forced-tool"  # a call takes more than one token, and of its first one vLLM says that it is none
    return ""


def for_prefill(path: str, fields: dict[str, Any], extra: dict[str, Any], begins_answer: bool = False) -> bytes:
    """The same prompt, one token, no stream; with what the connector adds. `begins_answer` as connectors have it."""
    dropped = _OF_THE_TRANSPORT if begins_answer else _ONLY_FOR_ANSWERS
    body = {name: value for name, value in fields.items() if name not in dropped}
    body["stream"] = False
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        del body["thinking"]  # it only sets a budget, of more than one token
    if path == RESPONSES:
        body["max_output_tokens"] = 1
        body["store"] = False  # nobody could ask for it
    else:
        body["max_tokens"] = 1
        if path != COMPLETIONS:
            body["max_completion_tokens"] = 1
    if "min_tokens" in body or (path in (CHAT, COMPLETIONS) and not begins_answer):
        body["min_tokens"] = 1  # engines keep nothing of a prompt after which the answer ends at once
    return json_of({**body, **extra})


def with_fields(body: bytes, extra: dict[str, Any]) -> bytes:
    """The client's bytes, with fields behind them. A client says nothing of transfers: what it sends is taken out."""
    if KV_TRANSFER in body:
        body = without_transfer(body)
    if not extra:
        return body
    trimmed = body.rstrip()
    inside = trimmed[:-1].rstrip()
    comma = b"" if inside.endswith(b"{") else b","
    return inside + comma + json_of(extra)[1:-1] + b"}"


def without_transfer(body: bytes) -> bytes:
    """Transfer parameters that a client made up could stop a pod's engine."""
    fields = fields_of(body)
    if fields is None or "kv_transfer_params" not in fields:
        return body
    return json_of({name: value for name, value in fields.items() if name != "kv_transfer_params"})


def json_of(fields: dict[str, Any]) -> bytes:
    """Raise BadRequest for what is nested too deeply to be written."""
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
    """One per medium, without the text around it; the same one twice is encoded once."""
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


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields for the next request: none where engines find embeddings by the digests of the media."""
    found: dict[str, Any] = {}
    for answer in answers:
        if isinstance(params := answer.get(TRANSFER), dict) and is_flat(params):
            found |= params
    return {TRANSFER: found} if found else {}


def is_flat(fields: dict[str, Any]) -> bool:
    """Return whether orjson can write this, inside of another object too."""
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


Counted = Callable[[str], Counter]
"""What counts requests, by what came of them."""


class Shared:
    def __init__(
        self,
        settings: DisaggregationSettings,
        failover: Failover,
        ledger: Ledger,
        clock: Clock,
        random: Random,
        tasks: Tasks,
        counted: Counted,
        expose_endpoint: bool = True,
    ) -> None:
        """`tasks` finish what nobody waits for. `expose_endpoint`: clients are told who computed the prompt."""
        self.failover = failover
        self.ledger = ledger
        self.clock = clock
        self.random = random
        self.tasks = tasks
        self.counted = counted
        self.expose_endpoint = expose_endpoint
        self.connector: Connector = connector_named(settings.connector)()
        self.prefill_timeout = settings.prefill_timeout


Prepare = Callable[[Attempt], None]
"""Makes the leg's request one for its pod."""


@dataclass(slots=True)
class Stages:
    """Of one request."""

    shared: Shared
    fields: dict[str, Any]
    """Of the client's body."""
    relay: Relay
    legs: Reserve

    def leg(self, attempt: Attempt, stage: Stage, pods: tuple[Endpoint, ...], body: bytes = b"") -> Attempt:
        """The leg of the same client that asks the first of `pods`, or the others after it."""
        request = changed(attempt.request, body=body, stream=False, max_tokens=1, asks_usage=False, naming=None)
        leg = Attempt(request, Decision(pods[0], pods[1:]), pods[0], 0, self.shared.clock.now())
        leg.stage, leg.answers = stage, False
        return leg

    async def ask(
        self, leg: Attempt, prepare: Prepare | None = None, held: ExitStack | None = None
    ) -> tuple[Attempt, bytes] | None:
        """The leg that was answered, and with what; None if nobody could. It stays open until `held` closes. Raises
        RequestError if nobody is to be asked any more."""
        while True:
            if prepare is not None:
                prepare(leg)
            try:
                with ExitStack() as attempt:
                    attempt.enter_context(self.legs(leg))
                    answer = await self.relay.collect(leg, self.shared.prefill_timeout)
                    self.shared.ledger.first_byte(leg)
                    if held is not None:
                        held.enter_context(attempt.pop_all())
                return leg, answer
            except UpstreamFailed as error:
                following = await self.following(leg, error.with_traceback(None))
            if following is None:
                return None
            leg = following

    async def encode(self, attempt: Attempt) -> dict[str, Any]:
        """What the next stage has to say of its media, which are shared out to the encode pods. What these fail, the
        next stage does itself."""
        pods = attempt.decision.encode
        bodies = encode_bodies(attempt.request.path, self.fields) if pods else []
        if not bodies:
            return {}
        try:
            async with asyncio.TaskGroup() as group:
                asked = []
                for number, body in enumerate(bodies):
                    at = number % len(pods)
                    leg = self.leg(attempt, Stage.ENCODE, pods[at:] + pods[:at], body)
                    asked.append(group.create_task(self.ask(leg)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        answers = (
            fields_of_pod(answered[1])
            for task in asked
            if (answered := task.result()) is not None and answered[0].status == 200
        )
        return merged([answer for answer in answers if answer is not None])

    async def following(self, leg: Attempt, error: UpstreamFailed) -> Attempt | None:
        """On one other pod, where the next stage can do without; on as many as any request may try where it cannot.
        None if nobody is left. Raises RequestError if nobody is to be asked any more."""
        spares = leg.stage is Stage.ENCODE or not self.shared.connector.needs_pair
        try:
            following = await self.shared.failover.following(leg, error, spares)
        except SuspectedPoison:
            raise
        except (BadGateway, GatewayTimeout):
            if self.shared.clock.now() >= leg.request.deadline:
                raise
            return None
        following.stage, following.answers = leg.stage, False
        return following
