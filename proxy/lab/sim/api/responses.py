"""POST /v1/responses, and the responses that this pod, and only this pod, remembers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.call import Call, Service, json_response
from proxy.lab.sim.api.errors import ApiError
from proxy.lab.sim.api.generation import generation, sampling_of
from proxy.lab.sim.api.response import ResponseEvents, StoredResponse
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.api.stream import EventStream
from proxy.lab.sim.prompt import render_chat

REMEMBERED = 1_000


class InvalidRequest(ApiError):
    type = "invalid_request_error"


class UnknownResponse(InvalidRequest):
    status = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", "response_id")


class Responses:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/responses", self.create),
            Route("GET", "/v1/responses/*", self.retrieve),
            Route("POST", "/v1/responses/*/cancel", self.cancel),
        ]

    async def create(self, call: Call) -> web.StreamResponse:
        response = self._response(call, call.body())
        if response.fields.get("store", True):
            self._store(response)
        if response.background:
            response.answers.submit()
            return json_response(response.as_json() | {"status": "queued"})
        if fields.flag(response.fields, "stream"):
            return await self._stream(call, response)
        with response.answers:
            await response.answers.ended()
        return json_response(response.as_json())

    async def retrieve(self, call: Call) -> web.StreamResponse:
        return json_response(self._find(call.tail).as_json())

    async def cancel(self, call: Call) -> web.StreamResponse:
        response = self._find(call.tail)
        if response.status != "in_progress":
            raise InvalidRequest("Cannot cancel a synchronous response.", "response_id")
        response.answers.stop()
        return json_response(response.as_json())

    async def _stream(self, call: Call, response: StoredResponse) -> web.StreamResponse:
        async with EventStream(call) as stream:
            events = ResponseEvents(stream, response)
            response.answers.listener = events.take
            with response.answers:
                events.open()
                await response.answers.ended()
            events.close()
        return stream.response

    def _response(self, call: Call, body: fields.Body) -> StoredResponse:
        turn = _messages(body)
        model = call.take_model(body, self._service.config)
        previous = fields.text(body, "previous_response_id")
        history = self._find(previous).conversation if previous else []
        prompt = render_chat([*_instructions(body), *history, *turn], body.get("tools") or ())
        sampling = sampling_of(body, self._service.config, "max_output_tokens")
        answers = generation(self._service, call, model, [prompt], sampling, body)
        created = int(self._service.wall())
        return StoredResponse(f"resp_{call.id}", created, model, body, [*history, *turn], answers)

    def _store(self, response: StoredResponse) -> None:
        self._stored[response.id] = response
        if len(self._stored) > REMEMBERED:
            self._stored.popitem(last=False)

    def _find(self, response_id: str) -> StoredResponse:
        try:
            return self._stored[response_id]
        except KeyError:
            raise UnknownResponse(response_id) from None


def _instructions(body: fields.Body) -> list[dict[str, Any]]:
    """They hold for one turn and are not remembered."""
    instructions = fields.text(body, "instructions")
    return [{"role": "system", "content": instructions}] if instructions else []


def _messages(body: fields.Body) -> list[dict[str, Any]]:
    given = fields.required(body, "input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return [_message(item) for item in fields.objects(body, "input")]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if "role" in item:
        return {"role": item["role"], "content": item.get("content")}
    return {"role": "tool", "content": item.get("output", item)}
