"""Handlers of health, version, models, metrics and sleep mode; and /admin, which only a simulated engine has."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from proxy.lab.sim.engine import SimEngine
from proxy.lab.sim.faults import Fault, FaultKind
from proxy.lab.sim.fields import SimError
from proxy.lab.sim.http import Routes, SimRequest, json_response
from proxy.lab.sim.metrics import expose

VERSION = "0.32.0"


async def health(request: SimRequest) -> web.StreamResponse:
    return web.Response()


async def version(request: SimRequest) -> web.StreamResponse:
    return json_response({"version": VERSION})


async def load(request: SimRequest) -> web.StreamResponse:
    return json_response({"server_load": len(request.service.log.open)})


async def models(request: SimRequest) -> web.StreamResponse:
    config = request.config
    cards = [_card(request, config.model, None, config.max_model_len)]
    cards += [_card(request, adapter, config.model, None) for adapter in config.lora_adapters]
    return json_response({"object": "list", "data": cards})


def _card(request: SimRequest, name: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(request.service.started_at),
        "owned_by": "vllm",
        "root": name,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


async def metrics(request: SimRequest) -> web.StreamResponse:
    driver = request.service.driver
    text = expose(driver.engines, driver.wall(), request.service.started_at)
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=text.encode(), headers=headers)


async def sleep(request: SimRequest) -> web.StreamResponse:
    """Put the engine to sleep; `?level=2` discards the weights too. A sleeping pod still responds to requests, so that
    tests can check that it receives no requests."""
    request.service.driver.forget_prefixes()
    return _set_sleep(request, int(request.web_request.query.get("level", "1")))


async def wake_up(request: SimRequest) -> web.StreamResponse:
    return _set_sleep(request, 0)


def _set_sleep(request: SimRequest, level: int) -> web.StreamResponse:
    for engine in request.service.driver.engines:
        engine.sleep_level = level
    return web.Response()


async def is_sleeping(request: SimRequest) -> web.StreamResponse:
    return json_response({"is_sleeping": request.service.driver.engines[0].sleep_level > 0})


async def requests(request: SimRequest) -> web.StreamResponse:
    return json_response([record.as_json() for record in request.service.log])


async def state(request: SimRequest) -> web.StreamResponse:
    """Return the sums over all ranks and the mean of `kv_usage`; for a pod with several ranks, also the state of each
    rank."""
    log, ranks = request.service.log, [_state_of(engine) for engine in request.service.driver.engines]
    pod = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    pod["kv_usage"] /= len(ranks)
    return json_response(
        {
            "role": request.config.role,
            **pod,
            "aborted": log.aborted,
            "in_flight": [record.id for record in log.open],
            **({"ranks": ranks} if len(ranks) > 1 else {}),
        }
    )


async def reset(request: SimRequest) -> web.StreamResponse:
    """Clear the prefix cache and the log of ended requests; requests in flight continue."""
    request.service.driver.forget_prefixes()
    request.service.log.clear()
    return json_response({"success": True})


async def faults(request: SimRequest) -> web.StreamResponse:
    """Return the faults with the number of requests that met them, and the current states of the pod."""
    service = request.service
    met = zip(service.faults.faults, service.faults.met, strict=True)
    return json_response(
        {
            "seed": service.faults.seed,
            "faults": [{**asdict(fault), "kind": fault.kind.value, "met": count} for fault, count in met],
            "states": [kind.value for kind in service.condition.at(service.driver.now())],
        }
    )


async def set_faults(request: SimRequest) -> web.StreamResponse:
    """Replace all faults with `{"seed": 0, "faults": [{"kind": "reset", "probability": 0.1, "events": 3}]}`; see
    `proxy.lab.sim.faults`. States of the pod last until their time has passed."""
    try:
        wanted = orjson.loads(request.raw)
        given = [Fault(**{**fault, "kind": FaultKind(fault["kind"])}) for fault in wanted["faults"]]
        request.service.faults.set(given, int(wanted.get("seed", 0)))
    except (KeyError, TypeError, ValueError) as error:
        raise SimError(f"These are no faults: {error}") from error
    return await faults(request)


ROUTES: Routes = {
    **dict.fromkeys(("GET /health", "GET /ping", "POST /ping"), health),
    "GET /version": version,
    "GET /load": load,
    "GET /v1/models": models,
    "GET /metrics": metrics,
    "POST /sleep": sleep,
    "POST /wake_up": wake_up,
    "GET /is_sleeping": is_sleeping,
    "GET /admin/requests": requests,
    "GET /admin/state": state,
    "POST /admin/reset": reset,
    "GET /admin/faults": faults,
    "POST /admin/faults": set_faults,
}


def _state_of(engine: SimEngine) -> dict[str, float]:
    return {
        "running": len(engine.running),
        "waiting": len(engine.waiting),
        "loading": len(engine.loading),
        "kept_blocks": engine.kept_blocks,
        "kv_usage": engine.kv_usage,
        "cached_blocks": engine.pool.idle,
    }
