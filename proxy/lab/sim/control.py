"""Health, version, models, metrics and sleep mode; and /admin, which only a simulated engine has."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from proxy.lab.sim.engine import Engine
from proxy.lab.sim.faults import Fault, Kind
from proxy.lab.sim.fields import BadRequest
from proxy.lab.sim.http import SERVER, Call, Service, json_response
from proxy.lab.sim.metrics import expose
from proxy.lab.sim.routes import Route

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
        text = expose(self._service.driver.engines, self._service.wall(), self._service.started_at)
        headers = {"Server": SERVER, "Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=text.encode(), headers=headers)


class Sleep:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/sleep", self.sleep),
            Route("POST", "/wake_up", self.wake_up),
            Route("GET", "/is_sleeping", self.is_sleeping),
        ]

    async def sleep(self, call: Call) -> web.StreamResponse:
        """`?level=2` discards the weights too. Who is asleep answers all the same: to see that nobody asks."""
        self._set_level(int(call.request.query.get("level", "1")))
        self._service.driver.forget_prefixes()
        return web.Response(headers={"Server": SERVER})

    async def wake_up(self, call: Call) -> web.StreamResponse:
        self._set_level(0)
        return web.Response(headers={"Server": SERVER})

    async def is_sleeping(self, call: Call) -> web.StreamResponse:
        return json_response({"is_sleeping": self._service.driver.engines[0].sleep_level > 0})

    def _set_level(self, level: int) -> None:
        for engine in self._service.driver.engines:
            engine.sleep_level = level


class Admin:
    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/admin/requests", self.requests),
            Route("GET", "/admin/state", self.state),
            Route("POST", "/admin/reset", self.reset),
            Route("GET", "/admin/faults", self.faults),
            Route("POST", "/admin/faults", self.set_faults),
        ]

    async def requests(self, call: Call) -> web.StreamResponse:
        return json_response([record.as_json() for record in self._service.log])

    async def state(self, call: Call) -> web.StreamResponse:
        """The sums over all ranks, the mean of `kv_usage`, and of a pod with several ranks each of them."""
        engines, log = self._service.driver.engines, self._service.log
        ranks = [_state_of(engine) for engine in engines]
        pod = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        pod["kv_usage"] /= len(ranks)
        return json_response(
            {
                "role": self._service.config.role,
                **pod,
                "aborted": log.aborted,
                "in_flight": [record.id for record in log.open],
                **({"ranks": ranks} if len(ranks) > 1 else {}),
            }
        )

    async def reset(self, call: Call) -> web.StreamResponse:
        """Forgets prefixes and ended calls; what is in flight goes on."""
        self._service.driver.forget_prefixes()
        self._service.log.clear()
        return json_response({"success": True})

    async def faults(self, call: Call) -> web.StreamResponse:
        """What requests may meet, how many did, and the states that the pod is in."""
        service = self._service
        faults = zip(service.faults.faults, service.faults.met, strict=True)
        return json_response(
            {
                "seed": service.faults.seed,
                "faults": [{**_as_json(fault), "met": met} for fault, met in faults],
                "states": [kind.value for kind in service.condition.at(service.driver.now())],
            }
        )

    async def set_faults(self, call: Call) -> web.StreamResponse:
        """Those of `{"seed": 0, "faults": [{"kind": "reset", "probability": 0.1, "events": 3}]}` in place of all
        others; see `proxy.lab.sim.faults`. A state that the pod is in passes by itself."""
        try:
            wanted = orjson.loads(call.raw)
            faults = [Fault(**{**fault, "kind": Kind(fault["kind"])}) for fault in wanted["faults"]]
            self._service.faults.set(faults, int(wanted.get("seed", 0)))
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequest(f"These are no faults: {error}") from error
        return await self.faults(call)


def _state_of(engine: Engine) -> dict[str, float]:
    return {
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "loading": len(engine.loading),
        "kept_blocks": engine.kept_blocks,
        "kv_usage": engine.kv_usage,
        "cached_blocks": engine.pool.cached,
    }


def _as_json(fault: Fault) -> dict[str, object]:
    return {**asdict(fault), "kind": fault.kind.value}
