"""All routes of a pod, as one aiohttp application."""

from __future__ import annotations

from aiohttp import web

from proxy.lab.sim.api.admin import Admin
from proxy.lab.sim.api.audio import Audio
from proxy.lab.sim.api.call import Service
from proxy.lab.sim.api.chat import ChatCompletions
from proxy.lab.sim.api.completions import Completions
from proxy.lab.sim.api.messages import Messages
from proxy.lab.sim.api.pooling import Pooling
from proxy.lab.sim.api.realtime import Realtime
from proxy.lab.sim.api.responses import Responses
from proxy.lab.sim.api.routes import Dispatcher
from proxy.lab.sim.api.sleep import Sleep
from proxy.lab.sim.api.status import Status
from proxy.lab.sim.api.tokens import Tokens

LARGEST_BODY = 256 * 1024 * 1024


def build(service: Service) -> web.Application:
    rooms = (ChatCompletions, Completions, Responses, Messages, Pooling, Tokens, Audio, Realtime, Status, Sleep, Admin)
    dispatcher = Dispatcher(service, [route for room in rooms for route in room(service).routes()])
    app = web.Application(client_max_size=LARGEST_BODY)
    app.router.add_route("*", "/{path:.*}", dispatcher.answer)
    return app
