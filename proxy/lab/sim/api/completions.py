"""POST /v1/completions: text in, text out; lists of prompts are batches."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import Call, Service, json_response
from proxy.lab.sim.api.chunks import ChunkWriter, Head, StreamOptions, quoted
from proxy.lab.sim.api.errors import BadRequest, invalid
from proxy.lab.sim.api.generation import FINGERPRINT, Generation, generation, sampling_of
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.api.stream import EventStream
from proxy.lab.sim.prompt import VOCABULARY, from_token_ids
from proxy.lab.sim.sequence import Output, Sequence


class Completions:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("POST", "/v1/completions", self.create)]

    async def create(self, call: Call) -> web.StreamResponse:
        body = call.body()
        model = call.take_model(body, self._service.config)
        options = StreamOptions.of(body)
        sampling = sampling_of(body, self._service.config)
        answers = generation(self._service, call, model, prompts_of(body, "prompt"), sampling, body)
        head = Head(f"cmpl-{call.id}", "text_completion", int(self._service.wall()), model)
        if fields.flag(body, "stream"):
            return await self._stream(call, answers, head, options)
        with answers:
            await answers.ended()
        return json_response(_whole(head, answers))

    async def _stream(self, call: Call, answers: Generation, head: Head, options: StreamOptions) -> web.StreamResponse:
        async with EventStream(call) as stream:
            chunks = TextChunks(stream, head, options, answers)
            answers.listener = chunks.take
            with answers:
                await answers.ended()
            chunks.close()
        return stream.response


class TextChunks(ChunkWriter):
    """One token is `"text"` of one choice."""

    def take(self, output: Output) -> None:
        if not output.text and not output.finish:
            return
        finish = b'"%b"' % output.finish.value.encode() if output.finish else b"null"
        stop = quoted(output.sequence.stop_reason.encode()) if output.sequence.stop_reason else b"null"
        choice = (
            b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b,'
            b'"prompt_token_ids":null,"token_ids":null}' % (self.index_of(output), quoted(output.text), finish, stop)
        )
        self.write(choice, output)


def prompts_of(body: fields.Body, name: str) -> list[bytes]:
    """A string, token ids, or a list of either."""
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
            raise BadRequest(f"Token id {token} is out of vocabulary")
    return from_token_ids(ids)


def _whole(head: Head, answers: Generation) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": head.object,
        "created": head.created,
        "model": head.model,
        "choices": [_choice(index, sequence) for index, sequence in enumerate(answers.sequences)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": answers.usage.as_json(),
        "kv_transfer_params": answers.kv_transfer_params,
    }


def _choice(index: int, sequence: Sequence) -> dict[str, Any]:
    return {
        "index": index,
        "text": sequence.answer.decode(),
        "logprobs": None,
        "finish_reason": sequence.finish.value if sequence.finish else None,
        "stop_reason": sequence.stop_reason,
        "token_ids": None,
        "prompt_logprobs": None,
        "prompt_token_ids": None,
    }
