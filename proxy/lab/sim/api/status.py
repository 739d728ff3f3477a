"""What a pod says of itself: health, version, models, metrics."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from proxy.lab.sim.api.call import SERVER, Call, Service, json_response
from proxy.lab.sim.api.routes import Route
from proxy.lab.sim.exposition import expose

VERSION = "0.32.0"


class Status:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/health", self.health),
            Route("GET", "/ping", self.health),
            Route("POST", "/ping", self.health),
            Route("GET", "/version", self.version),
            Route("GET", "/load", self.load),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/metrics", self.metrics),
        ]

    async def health(self, call: Call) -> web.StreamResponse:
        return web.Response(headers={"Server": SERVER})

    async def version(self, call: Call) -> web.StreamResponse:
        return json_response({"version": VERSION})

    async def load(self, call: Call) -> web.StreamResponse:
        return json_response({"server_load": len(self._service.log.open)})

    async def models(self, call: Call) -> web.StreamResponse:
        config = self._service.config
        cards = [self._card(config.model, None, config.max_model_len)]
        cards += [self._card(adapter, config.model, None) for adapter in config.lora_adapters]
        return json_response({"object": "list", "data": cards})

    def _card(self, name: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(self._service.started_at),
            "owned_by": "vllm",
            "root": name,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [],
        }

    async def metrics(self, call: Call) -> web.StreamResponse:
        text = expose(self._service.driver.engine, self._service.wall(), self._service.started_at)
        headers = {"Server": SERVER, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=text.encode(), headers=headers)
