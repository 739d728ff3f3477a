"""One HTTP call to a pod, and what a handler needs to answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.errors import unknown_model
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.faults import Condition, Fault, Faults
from proxy.lab.sim.requests import RequestLog, RequestRecord
from proxy.lab.sim.transfer.connector import Connector
from proxy.lab.sim.transfer.embeddings import Embeddings

SERVER = "uvicorn"


@dataclass(frozen=True, slots=True)
class Service:
    """What all handlers of one pod share. `wall` is the time in seconds since the epoch; `out` closes the port, as the
    fault says."""

    config: SimConfig
    driver: EngineDriver
    connector: Connector
    embeddings: Embeddings
    log: RequestLog
    wall: Callable[[], float]
    started_at: float
    faults: Faults
    condition: Condition
    out: Callable[[Fault], None]


@dataclass(frozen=True, slots=True)
class Call:
    """`id` is the client's X-Request-Id, else one of ours; `tail` is what the path has after the route's prefix;
    `fault` is what it met."""

    id: str
    request: web.Request
    raw: bytes
    record: RequestRecord
    tail: str = ""
    fault: Fault | None = None

    def body(self) -> fields.Body:
        return fields.parse(self.request.headers.get("Content-Type", ""), self.raw)

    def take_model(self, body: fields.Body, config: SimConfig) -> str:
        """The model that was asked for; without a name it is the base model."""
        name = fields.text(body, "model") or config.model
        if name not in config.models:
            raise unknown_model(name, config.model)
        self.record.model = name
        return name


def json_response(content: Any, status: int = 200) -> web.Response:
    return raw_json(orjson.dumps(content), status)


def raw_json(content: bytes, status: int = 200) -> web.Response:
    return web.Response(body=content, status=status, content_type="application/json", headers={"Server": SERVER})
