"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
from aiohttp import web

from proxy.lab.sim import fields
from proxy.lab.sim.generation import Generation, generation, quoted, sampling_of
from proxy.lab.sim.http import Call, EventStream, Service, event, json_response
from proxy.lab.sim.routes import Route
from proxy.lab.sim.sequence import Finish, Output, Sampling, Sequence, render_chat, tokens_in


class Messages:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/messages", self.create),
            Route("POST", "/v1/messages/count_tokens", self.count_tokens),
        ]

    async def create(self, call: Call) -> web.StreamResponse:
        body = call.body()
        prompt = _prompt(body)
        fields.required(body, "max_tokens")
        model = call.resolve_model(body, self._service.config)
        generated = generation(self._service, call, model, [prompt], self._sampling(body), body)
        message = _message(call, model)
        if fields.flag(body, "stream"):
            return await self._stream(call, generated, message)
        with generated:
            await generated.ended()
        sequence = generated.sequences[0]
        content = [{"type": "text", "text": sequence.response.decode()}]
        response = message | {"content": content, "usage": _usage(generated)} | _stop(sequence)
        return json_response(response | {"kv_transfer_params": generated.kv_transfer_params})

    async def count_tokens(self, call: Call) -> web.StreamResponse:
        body = call.body()
        prompt = _prompt(body)
        call.resolve_model(body, self._service.config)
        tokens = tokens_in(prompt)
        return json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    def _sampling(self, body: fields.Body) -> Sampling:
        stop = tuple(stop.encode() for stop in fields.strings(body, "stop_sequences") if stop)
        return replace(sampling_of(body, self._service.config), stop=stop)

    async def _stream(self, call: Call, generated: Generation, message: dict[str, Any]) -> web.StreamResponse:
        async with EventStream(call) as stream:
            events = MessageEvents(stream, generated, message)
            generated.listener = events.write_output
            with generated:
                await generated.ended()
            events.close()
        return stream.response


class MessageEvents:
    """The events of one stream: one text block, then why it ended."""

    def __init__(self, stream: EventStream, generated: Generation, message: dict[str, Any]) -> None:
        self._stream = stream
        self._generated = generated
        self._message = message
        self._begun = False

    def write_output(self, output: Output) -> None:
        if not self._begun:
            self._begun = True
            self._open(output)
        if output.text:
            self._stream.send(
                b'event: content_block_delta\ndata: {"type":"content_block_delta",'
                b'"delta":{"type":"text_delta","text":%b},"index":0}\n\n' % quoted(output.text)
            )

    def _open(self, output: Output) -> None:
        usage = {"input_tokens": output.sequence.progress.prompt_tokens, "output_tokens": 0}
        self._send("message_start", message=self._message | {"usage": usage})
        self._send("content_block_start", content_block={"type": "text", "text": ""}, index=0)

    def close(self) -> None:
        self._send("content_block_stop", index=0)
        self._send("message_delta", delta=_stop(self._generated.sequences[0]), usage=_usage(self._generated))
        self._send("message_stop")

    def _send(self, name: str, **content: object) -> None:
        self._stream.send(event(name.encode(), orjson.dumps({"type": name, **content})))


def _prompt(body: fields.Body) -> bytes:
    """The system prompt is a message like any other."""
    messages = fields.objects(body, "messages")
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return render_chat([*system, *messages], body.get("tools") or ())


def _message(call: Call, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{call.id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(sequence: Sequence) -> dict[str, Any]:
    if sequence.finish is Finish.LENGTH:
        reason = "max_tokens"
    else:
        reason = "stop_sequence" if sequence.stop_reason else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence.stop_reason}


def _usage(generated: Generation) -> dict[str, Any]:
    usage = generated.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens or 0,
    }
