"""Handlers of POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiohttp import web

from proxy.lab.sim import fields
from proxy.lab.sim.fields import Json
from proxy.lab.sim.generation import Generation, Writer, generation, sampling_of
from proxy.lab.sim.http import EventStream, Routes, SimRequest, event, json_response
from proxy.lab.sim.sequence import Finish, Output, Sequence, render_chat, tokens_in


async def create(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    prompt = _prompt(body)
    fields.required(body, "max_tokens")
    model = request.resolve_model(body)
    stop = tuple(stop.encode() for stop in fields.strings(body, "stop_sequences") if stop)
    generated = generation(request, model, [prompt], replace(sampling_of(body), stop=stop), body)
    message = _message(request, model)
    if fields.flag(body, "stream"):
        return await generated.streamed(lambda stream: MessageEvents(stream, generated, message))
    await generated.run()
    sequence = generated.sequences[0]
    content = [{"type": "text", "text": sequence.response.decode()}]
    response = message | {"content": content, "usage": _usage(generated)} | _stop(sequence)
    return json_response(response | {"kv_transfer_params": generated.kv_transfer_params})


async def count_tokens(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    prompt = _prompt(body)
    request.resolve_model(body)
    tokens = tokens_in(prompt)
    return json_response({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


ROUTES: Routes = {"POST /v1/messages": create, "POST /v1/messages/count_tokens": count_tokens}


@dataclass(slots=True)
class MessageEvents(Writer):
    """The renderer of one stream: one text block, then the stop reason."""

    stream: EventStream
    generated: Generation
    message: Json
    has_started: bool = False

    def write_output(self, output: Output) -> None:
        if not self.has_started:
            self.has_started = True
            usage = {"input_tokens": output.sequence.progress.prompt_tokens, "output_tokens": 0}
            self._send("message_start", message=self.message | {"usage": usage})
            self._send("content_block_start", content_block={"type": "text", "text": ""}, index=0)
        if output.text:
            delta = {"type": "text_delta", "text": output.text.decode()}
            self._send("content_block_delta", delta=delta, index=0)

    def close(self) -> None:
        self._send("content_block_stop", index=0)
        self._send("message_delta", delta=_stop(self.generated.sequences[0]), usage=_usage(self.generated))
        self._send("message_stop")

    def _send(self, name: str, **content: object) -> None:
        self.stream.send(event(name, {"type": name, **content}))


def _prompt(body: Json) -> bytes:
    """Return the prompt; the system prompt is its first message."""
    messages = fields.objects(body, "messages")
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return render_chat([*system, *messages], body.get("tools") or ())


def _message(request: SimRequest, model: str) -> Json:
    return {
        "id": f"chatcmpl-{request.id}",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _stop(sequence: Sequence) -> Json:
    if sequence.finish is Finish.LENGTH:
        reason = "max_tokens"
    else:
        reason = "stop_sequence" if sequence.stop_reason else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence.stop_reason}


def _usage(generated: Generation) -> Json:
    usage = generated.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens or 0,
    }
