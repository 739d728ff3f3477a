"""The WebSocket /v1/realtime: says that a session is there, then gives every event back."""

from __future__ import annotations

import orjson
from aiohttp import WSMessage, WSMsgType, web

from proxy.lab.sim.api.call import Call, Service
from proxy.lab.sim.api.routes import Route


class Realtime:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("GET", "/v1/realtime", self.talk)]

    async def talk(self, call: Call) -> web.StreamResponse:
        call.take_model(dict(call.request.query), self._service.config)
        socket = web.WebSocketResponse()
        await socket.prepare(call.request)
        await socket.send_json({"type": "session.created", "id": f"sess-{call.id}", "model": call.record.model})
        async for message in socket:
            await _echo(socket, message)
        return socket


async def _echo(socket: web.WebSocketResponse, message: WSMessage) -> None:
    if message.type is WSMsgType.BINARY:
        await socket.send_bytes(message.data)
        return
    try:
        event = orjson.loads(message.data)
    except orjson.JSONDecodeError:
        await socket.send_json({"type": "error", "error": {"message": "Invalid JSON"}})
        return
    await socket.send_json({"type": "echo", "event": event})
