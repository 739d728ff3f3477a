"""One response of the Responses API: its state, its JSON, its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.chunks import quoted
from proxy.lab.sim.api.generation import Generation
from proxy.lab.sim.api.stream import EventStream, event
from proxy.lab.sim.sequence import Finish, Output, Phase, Sequence

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Its state is that of its sequence. `fields` is the request's body, `messages` all turns up to the answer."""

    id: str
    created: int
    model: str
    fields: fields.Body
    messages: list[Json]
    answers: Generation

    @property
    def sequence(self) -> Sequence:
        return self.answers.sequences[0]

    @property
    def background(self) -> bool:
        return bool(self.fields.get("background"))

    @property
    def is_streamed(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def status(self) -> str:
        if self.sequence.phase is not Phase.ENDED:
            return "in_progress"
        if self.sequence.finish is None:
            return "cancelled"
        if self.sequence.finish is Finish.ERROR:
            return "failed"
        return "incomplete" if self.sequence.finish is Finish.LENGTH else "completed"

    @property
    def text(self) -> str:
        return self.sequence.answer.decode()

    @property
    def conversation(self) -> list[Json]:
        """What a following turn begins with."""
        return [*self.messages, {"role": "assistant", "content": self.text}]

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
            "usage": _usage(self.answers) if ended else None,
            "kv_transfer_params": self.answers.kv_transfer_params if ended and not self.is_streamed else None,
        }


class ResponseEvents:
    """The events of one stream, numbered from 0; the last one is `response.completed`, whatever ended it."""

    def __init__(self, stream: EventStream, response: StoredResponse) -> None:
        self._stream = stream
        self._response = response
        self._number = 0
        self._begun = False
        self._item: Json = {"item_id": response.message_id, "output_index": 0, "content_index": 0}
        self._delta = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":%%b,"item_id":%b,' % quoted(
            response.message_id.replace("%", "%%").encode()
        )

    def open(self) -> None:
        self._send("response.created", response=self._response.as_json())
        self._send("response.in_progress", response=self._response.as_json())

    def take(self, output: Output) -> None:
        if not self._begun:
            self._begin()
        if not output.text:
            return
        tail = b'"logprobs":[],"output_index":0,"sequence_number":%d,"type":"response.output_text.delta"}\n\n'
        self._stream.send(self._delta % quoted(output.text) + tail % self._number)
        self._number += 1

    def close(self) -> None:
        if self._begun:
            self._end()
        self._send("response.completed", response=self._response.as_json())

    def _begin(self) -> None:
        self._begun = True
        self._send("response.output_item.added", item=self._response.message("in_progress", []), output_index=0)
        self._send("response.content_part.added", part=text_part(""), **self._item)

    def _end(self) -> None:
        text = self._response.text
        done = self._response.message("completed", [text_part(text)])
        self._send("response.output_text.done", text=text, logprobs=[], **self._item)
        self._send("response.content_part.done", part=text_part(text), **self._item)
        self._send("response.output_item.done", item=done, output_index=0)

    def _send(self, name: str, **content: object) -> None:
        numbered = {**content, "sequence_number": self._number, "type": name}
        self._stream.send(event(name.encode(), orjson.dumps(numbered)))
        self._number += 1


def text_part(text: str) -> Json:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": []}


def _usage(answers: Generation) -> Json:
    usage = answers.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
