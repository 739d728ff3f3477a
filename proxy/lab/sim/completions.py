"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from proxy.lab.sim import fields
from proxy.lab.sim.fields import Json, SimError, invalid
from proxy.lab.sim.generation import (
    Generation,
    Writer,
    generation,
    response_head,
    sampling_of,
)
from proxy.lab.sim.http import DONE, EventStream, Routes, SimRequest, data, json_response
from proxy.lab.sim.sequence import (
    VOCABULARY,
    Finish,
    Output,
    SamplingParams,
    Sequence,
    from_token_ids,
    render_chat,
    tokens_in,
)

EXAMPLES: Json = {"string": "sim", "integer": 1, "number": 0.5, "boolean": True, "null": None, "array": []}


FINGERPRINT = "vllm-0.32.0-sim"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage: bool = False

    @classmethod
    def of(cls, body: Json) -> StreamOptions:
        options = body.get("stream_options")
        if options is None:
            return cls()
        if not body.get("stream"):
            message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
            raise SimError(message, "stream_options")
        if not isinstance(options, dict):
            raise invalid("model_attributes_type", "body.stream_options", "Input should be a valid dictionary", options)
        include = fields.flag(options, "include_usage")
        return cls(include, include and fields.flag(options, "continuous_usage_stats"))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON in ASCII."""

    name: str
    arguments: bytes


def forced_call(body: Json) -> ToolCall | None:
    """Return the call that `tool_choice` requires: of the named function, or of the first function."""
    functions = [tool.get("function", tool) for tool in body.get("tools") or ()]
    choice = body.get("tool_choice")
    if choice == "required" and functions:
        wanted = functions[0].get("name")
    elif isinstance(choice, Mapping):
        wanted = choice.get("function", choice).get("name")
    else:
        return None
    for function in functions:
        if function.get("name") == wanted:
            example = _example(function.get("parameters") or {"type": "object"})
            return ToolCall(str(wanted), json.dumps(example).encode())
    raise SimError("The tool specified in `tool_choice` does not match any of the specified `tools`")


def _example(schema: Mapping[str, Any]) -> Any:
    """Return the smallest value that matches the schema: required properties only."""
    if enum := schema.get("enum"):
        return enum[0]
    if "properties" in schema or schema.get("type") == "object":
        properties = schema.get("properties", {})
        return {name: _example(properties.get(name, {})) for name in schema.get("required", ())}
    return EXAMPLES.get(str(schema.get("type")), "sim")


async def complete(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    model = request.resolve_model(body)
    options = StreamOptions.of(body)
    generated = generation(request, model, prompts_of(body, "prompt"), sampling_of(body), body)
    head = response_head(request, "cmpl", "text_completion", model)
    if fields.flag(body, "stream"):
        return await generated.streamed(lambda stream: TextChunks(stream, head, options, generated))
    await generated.run()
    return json_response(_whole(head, generated, lambda sequence: {"text": sequence.response.decode()}))


async def chat(request: SimRequest) -> web.StreamResponse:
    body = request.body()
    messages = fields.objects(body, "messages")
    model = request.resolve_model(body)
    options = StreamOptions.of(body)
    tool = forced_call(body)
    prompt = chat_prompt(messages, body)
    generated = generation(request, model, [prompt], _sampling(body, tool), body)
    head = response_head(request, "chatcmpl", "chat.completion.chunk", model)
    if fields.flag(body, "stream"):
        return await generated.streamed(lambda stream: ChatChunks(stream, head, options, generated, tool))
    await generated.run()
    head["object"] = "chat.completion"
    whole = _whole(
        head, generated, lambda sequence: {"message": _message(sequence.response.decode(), head, tool)}, tool
    )
    return json_response(whole | {"ec_transfer_params": generated.ec_transfer_params})


ROUTES: Routes = {"POST /v1/completions": complete, "POST /v1/chat/completions": chat}


def _whole(
    head: Json, generated: Generation, content: Callable[[Sequence], Json], tool: ToolCall | None = None
) -> Json:
    """Return a non-streamed response; `content` returns the text fields of a choice."""
    choices = [
        {
            "index": index,
            **content(sequence),
            "logprobs": None,
            "finish_reason": _finish_reason(sequence.finish, tool),
            "stop_reason": sequence.stop_reason,
            "token_ids": None,
        }
        for index, sequence in enumerate(generated.sequences)
    ]
    return head | {
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": generated.usage.as_json(),
        "prompt_logprobs": None,
        "prompt_token_ids": None,
        "kv_transfer_params": generated.kv_transfer_params,
    }


@dataclass(slots=True)
class ChunkWriter(Writer):
    """Writes the chunks of one stream; a subclass renders one token."""

    stream: EventStream
    head: Json
    options: StreamOptions
    generated: Generation

    def write(self, choice: Json, output: Output, *, opening: bool = False) -> None:
        """Send one chunk with one choice. An opening chunk precedes the first token."""
        chunk: Json = self.head | {"choices": [choice]}
        if self.options.continuous_usage:
            prompt = output.sequence.progress.prompt_tokens
            tokens = 0 if opening else output.sequence.progress.generated_tokens
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + tokens,
                "completion_tokens": tokens,
                "completion_tokens_details": None,
            }
        if output.finish and not opening and not self.options.include_usage:
            chunk["system_fingerprint"] = FINGERPRINT
        self.stream.send(data(chunk))

    def close(self) -> None:
        """Send the usage, if requested, and the terminal event."""
        if self.options.include_usage:
            usage = self.generated.usage.as_json()
            self.stream.send(data(self.head | {"choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}))
        self.stream.send(DONE)


class TextChunks(ChunkWriter):
    """Renders a token as the `"text"` of one choice."""

    def write_output(self, output: Output) -> None:
        if output.text or output.finish:
            choice = {
                "index": self.generated.sequences.index(output.sequence),
                "text": output.text.decode(),
                "logprobs": None,
                "finish_reason": output.finish and output.finish.value,
                "stop_reason": output.sequence.stop_reason,
                "prompt_token_ids": None,
                "token_ids": None,
            }
            self.write(choice, output)


def prompts_of(body: Json, name: str) -> list[bytes]:
    """Return the prompts of a string, token ids, or a list of either."""
    value = fields.required(body, name)
    if isinstance(value, str):
        return [value.encode(errors="replace")]
    if not isinstance(value, list) or not value:
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", value)
    if isinstance(value[0], int):
        return [_token_prompt(value, name)]
    return [item.encode(errors="replace") if isinstance(item, str) else _token_prompt(item, name) for item in value]


def _token_prompt(ids: Any, name: str) -> bytes:
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", ids)
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < VOCABULARY:
            raise SimError(f"Token id {token} is out of vocabulary")
    return from_token_ids(ids)


def chat_prompt(messages: list[Json], body: Json) -> bytes:
    if not messages:
        raise SimError("Cannot apply chat template to an empty conversation. Provide at least one message.")
    continued = fields.flag(body, "continue_final_message")
    if continued and fields.flag(body, "add_generation_prompt"):
        raise SimError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return render_chat(messages, body.get("tools") or (), continue_final_message=continued)


def _sampling(body: Json, tool: ToolCall | None) -> SamplingParams:
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    sampling = sampling_of(body, limit)
    if tool is None:
        return sampling
    limited = body.get(limit) is not None
    most = sampling.max_tokens if limited else tokens_in(tool.arguments)
    return replace(sampling, script=tool.arguments, max_tokens=most)


def _tool_id(head: Json) -> str:
    return str(head["id"]).replace("chatcmpl-", "chatcmpl-tool-", 1)


@dataclass(slots=True)
class ChatChunks(ChunkWriter):
    """Renders a token as a `"delta"` of one choice; the role comes before the first delta of each choice."""

    tool: ToolCall | None
    opened_choices: set[int] = field(default_factory=set)

    def write_output(self, output: Output) -> None:
        index = self.generated.sequences.index(output.sequence)
        if index not in self.opened_choices:
            self.opened_choices.add(index)
            self._open_choice(index, output)
        if output.text or output.finish:
            text = output.text.decode()
            delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if self.tool else {"content": text}
            choice = {
                "index": index,
                "delta": delta if text else {},
                "logprobs": None,
                "finish_reason": _finish_reason(output.finish, self.tool),
                "token_ids": None,
            }
            if output.finish:
                choice["stop_reason"] = output.sequence.stop_reason
            self.write(choice, output)

    def _open_choice(self, index: int, output: Output) -> None:
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        if self.tool:
            function = {"name": self.tool.name, "arguments": ""}
            call = {"id": _tool_id(self.head), "type": "function", "index": 0, "function": function}
            deltas.append({"tool_calls": [call]})
        for delta in deltas:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            self.write(choice, output, opening=True)


def _finish_reason(finish: Finish | None, tool: ToolCall | None) -> str | None:
    if finish is Finish.STOP and tool:
        return "tool_calls"
    return finish and finish.value


def _message(text: str, head: Json, tool: ToolCall | None) -> Json:
    message: Json = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    if tool is not None:
        function = {"name": tool.name, "arguments": text}
        message |= {"content": None, "tool_calls": [{"id": _tool_id(head), "type": "function", "function": function}]}
    return message
