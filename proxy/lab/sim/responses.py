"""Handlers of POST /v1/responses, and the responses that this pod stores."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from proxy.lab.sim import fields
from proxy.lab.sim.fields import Json, SimError
from proxy.lab.sim.generation import Generation, Writer, generation, sampling_of
from proxy.lab.sim.http import EventStream, Routes, SimRequest, event, json_response
from proxy.lab.sim.sequence import Finish, Output, Phase, Sequence, render_chat

STATUSES = {None: "cancelled", Finish.ERROR: "failed", Finish.LENGTH: "incomplete", Finish.STOP: "completed"}
"""Status of an ended response by its finish reason."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response; its state is that of its sequence. `fields` is the body of the request, `messages` are all
    earlier turns."""

    id: str
    created: int
    model: str
    fields: Json
    messages: list[Json]
    generated: Generation

    @property
    def sequence(self) -> Sequence:
        return self.generated.sequences[0]

    @property
    def background(self) -> bool:
        return bool(self.fields.get("background"))

    @property
    def status(self) -> str:
        return STATUSES[self.sequence.finish] if self.sequence.phase is Phase.ENDED else "in_progress"

    @property
    def text(self) -> str:
        return self.sequence.response.decode()

    @property
    def message_id(self) -> str:
        return self.id.replace("resp_", "msg_", 1)

    def message(self, status: str, content: list[Json]) -> Json:
        return {"id": self.message_id, "content": content, "role": "assistant", "status": status, "type": "message"}

    def as_json(self) -> Json:
        ended = self.status != "in_progress"
        incomplete = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": incomplete,
            "instructions": self.fields.get("instructions"),
            "metadata": self.fields.get("metadata"),
            "model": self.model,
            "object": "response",
            "output": [self.message("completed", [text_part(self.text)])] if ended else [],
            "parallel_tool_calls": True,
            "temperature": self.fields.get("temperature", 1.0),
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": self.background,
            "max_output_tokens": self.sequence.sampling.max_tokens,
            "previous_response_id": self.fields.get("previous_response_id"),
            "service_tier": "auto",
            "status": self.status,
            "truncation": "disabled",
            "usage": _usage(self.generated) if ended else None,
            "kv_transfer_params": self.generated.kv_transfer_params
            if ended and not self.fields.get("stream")
            else None,
        }


class ResponseEvents(Writer):
    """The events of one stream, numbered from 0. The last event is `response.completed`, whatever the finish reason."""

    def __init__(self, stream: EventStream, response: StoredResponse) -> None:
        self._stream = stream
        self._response = response
        self._number = 0
        self._has_started = False
        self._item: Json = {"item_id": response.message_id, "output_index": 0, "content_index": 0}

    def open(self) -> None:
        self._send("response.created", response=self._response.as_json())
        self._send("response.in_progress", response=self._response.as_json())

    def write_output(self, output: Output) -> None:
        if not self._has_started:
            self._has_started = True
            self._send("response.output_item.added", item=self._response.message("in_progress", []), output_index=0)
            self._send("response.content_part.added", part=text_part(""), **self._item)
        if output.text:
            self._send("response.output_text.delta", delta=output.text.decode(), logprobs=[], **self._item)

    def close(self) -> None:
        if self._has_started:
            text = self._response.text
            done = self._response.message("completed", [text_part(text)])
            self._send("response.output_text.done", text=text, logprobs=[], **self._item)
            self._send("response.content_part.done", part=text_part(text), **self._item)
            self._send("response.output_item.done", item=done, output_index=0)
        self._send("response.completed", response=self._response.as_json())

    def _send(self, name: str, **content: object) -> None:
        self._stream.send(event(name, {**content, "sequence_number": self._number, "type": name}))
        self._number += 1


def text_part(text: str) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": []}


def _usage(generated: Generation) -> Json:
    usage = generated.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


REMEMBERED = 1_000


def _invalid(message: str, status: int = 400) -> SimError:
    return SimError(message, "response_id", status=status, type="invalid_request_error")


async def create(request: SimRequest) -> web.StreamResponse:
    response = _response(request, request.body())
    if response.fields.get("store", True):
        stored = request.service.responses
        stored[response.id] = response
        if len(stored) > REMEMBERED:
            del stored[next(iter(stored))]
    if response.background:
        response.generated.submit()
        return json_response(response.as_json() | {"status": "queued"})
    if fields.flag(response.fields, "stream"):
        return await response.generated.streamed(lambda stream: ResponseEvents(stream, response))
    await response.generated.run()
    return json_response(response.as_json())


async def retrieve(request: SimRequest) -> web.StreamResponse:
    return json_response(_stored(request, request.tail).as_json())


async def cancel(request: SimRequest) -> web.StreamResponse:
    response = _stored(request, request.tail)
    if response.status != "in_progress":
        raise _invalid("Cannot cancel a synchronous response.")
    response.generated.stop()
    return json_response(response.as_json())


ROUTES: Routes = {
    "POST /v1/responses": create,
    "GET /v1/responses/{tail}": retrieve,
    "POST /v1/responses/{tail}/cancel": cancel,
}


def _response(request: SimRequest, body: Json) -> StoredResponse:
    turn = _messages(body)
    model = request.resolve_model(body)
    history: list[Json] = []
    if previous_id := fields.text(body, "previous_response_id"):
        previous = _stored(request, previous_id)
        history = [*previous.messages, {"role": "assistant", "content": previous.text}]
    instructions = fields.text(body, "instructions")  # of one turn; the conversation does not keep them
    system = [{"role": "system", "content": instructions}] if instructions else []
    prompt = render_chat([*system, *history, *turn], body.get("tools") or ())
    generated = generation(request, model, [prompt], sampling_of(body, "max_output_tokens"), body)
    created = int(request.service.driver.wall())
    return StoredResponse(f"resp_{request.id}", created, model, body, [*history, *turn], generated)


def _stored(request: SimRequest, response_id: str) -> StoredResponse:
    response: StoredResponse | None = request.service.responses.get(response_id)
    if response is None:
        raise _invalid(f"Response with id '{response_id}' not found.", 404)
    return response


def _messages(body: Json) -> list[Json]:
    given = fields.required(body, "input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [
        {"role": item["role"], "content": item.get("content")}
        if "role" in item
        else {"role": "tool", "content": item.get("output", item)}
        for item in fields.objects(body, "input")
    ]
