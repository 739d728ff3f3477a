"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import Call, Service, json_response
from proxy.lab.sim.api.chunks import ChunkWriter, Head, StreamOptions, quoted
from proxy.lab.sim.api.errors import BadRequest
from proxy.lab.sim.api.generation import FINGERPRINT, Generation, generation, sampling_of
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.api.stream import EventStream
from proxy.lab.sim.api.tools import ToolCall, forced_call
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.prompt import render_chat
from proxy.lab.sim.sequence import Finish, Output, Sampling, Sequence
from proxy.lab.sim.text import tokens_in


class ChatCompletions:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/chat/completions", self.create)]

    async def create(self, call: Call) -> web.StreamResponse:
        body = call.body()
        messages = fields.objects(body, "messages")
        model = call.take_model(body, self._service.config)
        options = StreamOptions.of(body)
        tool = forced_call(body)
        prompt = chat_prompt(messages, body)
        sampling = _sampling(body, self._service.config, tool)
        answers = generation(self._service, call, model, [prompt], sampling, body)
        head = Head(f"chatcmpl-{call.id}", "chat.completion.chunk", int(self._service.wall()), model)
        if fields.flag(body, "stream"):
            return await self._stream(call, answers, head, options, tool)
        with answers:
            await answers.ended()
        return json_response(_whole(head, answers, tool))

    async def _stream(
        self, call: Call, answers: Generation, head: Head, options: StreamOptions, tool: ToolCall | None
    ) -> web.StreamResponse:
        async with EventStream(call) as stream:
            chunks = ChatChunks(stream, head, options, answers, _shape(head, tool))
            answers.listener = chunks.take
            with answers:
                await answers.ended()
            chunks.close()
        return stream.response


def chat_prompt(messages: list[dict[str, Any]], body: fields.Body) -> bytes:
    if not messages:
        raise BadRequest("Cannot apply chat template to an empty conversation. Provide at least one message.")
    continued = fields.flag(body, "continue_final_message")
    if continued and fields.flag(body, "add_generation_prompt"):
        raise BadRequest("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return render_chat(messages, body.get("tools") or (), continue_final_message=continued)


def _sampling(body: fields.Body, config: SimConfig, tool: ToolCall | None) -> Sampling:
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    sampling = sampling_of(body, config, limit)
    if tool is None:
        return sampling
    limited = body.get(limit) is not None
    most = sampling.max_tokens if limited else tokens_in(tool.arguments)
    return replace(sampling, script=tool.arguments, max_tokens=most)


@dataclass(frozen=True, slots=True)
class Shape:
    """How deltas look. `intro` comes with the first token, after the role; `ended` names the natural end."""

    intro: bytes | None
    token: Callable[[bytes], bytes]
    ended: bytes


def _shape(head: Head, tool: ToolCall | None) -> Shape:
    if tool is None:
        return Shape(None, lambda text: b'{"content":%b}' % quoted(text), b"stop")
    intro = b'{"tool_calls":[{"id":%b,"type":"function","index":0,"function":{"name":%b,"arguments":""}}]}' % (
        quoted(_tool_id(head).encode()),
        quoted(tool.name.encode()),
    )
    arguments = b'{"tool_calls":[{"index":0,"function":{"arguments":%b}}]}'
    return Shape(intro, lambda text: arguments % quoted(text), b"tool_calls")


def _tool_id(head: Head) -> str:
    return head.id.replace("chatcmpl-", "chatcmpl-tool-", 1)


class ChatChunks(ChunkWriter):
    """One token is a `"delta"` of one choice; the first of each choice is preceded by its role."""

    def __init__(
        self, stream: EventStream, head: Head, options: StreamOptions, answers: Generation, shape: Shape
    ) -> None:
        super().__init__(stream, head, options, answers)
        self._shape = shape
        self._begun: set[int] = set()

    def take(self, output: Output) -> None:
        index = self.index_of(output)
        if index not in self._begun:
            self._begun.add(index)
            self._begin(index, output)
        if output.finish:
            self._finish(index, output, output.finish)
        elif output.text:
            delta = self._shape.token(output.text)
            choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null,"token_ids":null}' % (index, delta)
            self.write(choice, output)

    def _begin(self, index: int, output: Output) -> None:
        first = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}'
        self.write(first % (index, b'{"role":"assistant","content":""}'), output, opening=True)
        if self._shape.intro is not None:
            self.write(first % (index, self._shape.intro), output, opening=True)

    def _finish(self, index: int, output: Output, finish: Finish) -> None:
        reason = self._shape.ended if finish is Finish.STOP else b"length"
        delta = self._shape.token(output.text) if output.text else b"{}"
        stop = quoted(output.sequence.stop_reason.encode()) if output.sequence.stop_reason else b"null"
        choice = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":"%b","stop_reason":%b,"token_ids":null}'
        self.write(choice % (index, delta, reason, stop), output)


def _whole(head: Head, answers: Generation, tool: ToolCall | None) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [_choice(index, sequence, head, tool) for index, sequence in enumerate(answers.sequences)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": answers.usage.as_json(),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": answers.kv_transfer_params,
        "ec_transfer_params": answers.ec_transfer_params,
    }


def _choice(index: int, sequence: Sequence, head: Head, tool: ToolCall | None) -> dict[str, Any]:
    finish = sequence.finish.value if sequence.finish else None
    return {
        "index": index,
        "message": _message(sequence.answer.decode(), head, tool),
        "logprobs": None,
        "finish_reason": "tool_calls" if tool and sequence.finish is Finish.STOP else finish,
        "stop_reason": sequence.stop_reason,
        "token_ids": None,
    }


def _message(text: str, head: Head, tool: ToolCall | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    if tool is not None:
        function = {"name": tool.name, "arguments": text}
        message |= {"content": None, "tool_calls": [{"id": _tool_id(head), "type": "function", "function": function}]}
    return message
