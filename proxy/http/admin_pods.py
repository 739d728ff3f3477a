"""/admin/pods: see the pods, add, drain and remove them."""

from __future__ import annotations

import math
from typing import Any

from aiohttp import web

from proxy.core import params
from proxy.core.endpoint import NEVER_SCRAPED, Endpoint, LoadView, Metrics
from proxy.core.errors import BadRequest, ConfigError, UnknownPod
from proxy.fleet.datastore import Fleet
from proxy.fleet.settings import PodSettings
from proxy.http.admin_answers import json_answer, json_body


class PodRoutes:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/pods", self.list)
        router.add_post("/admin/pods", self.add)
        router.add_get("/admin/pods/{name}", self.show)
        router.add_delete("/admin/pods/{name}", self.remove)
        router.add_post("/admin/pods/{name}/drain", self.drain)
        router.add_post("/admin/pods/{name}/undrain", self.undrain)

    async def list(self, request: web.Request) -> web.Response:
        return json_answer({"pods": [describe(endpoint) for endpoint in self._fleet.endpoints]})

    async def show(self, request: web.Request) -> web.Response:
        return json_answer(describe(self._named(request)))

    async def add(self, request: web.Request) -> web.Response:
        """201 for a new pod; 200 where a pod of this name was brought up to date."""
        pod = _pod(await json_body(request))
        for other in self._fleet.endpoints:
            if other.url == pod.url and other.name != pod.name:
                raise BadRequest(f"The pod '{other.name}' has this URL already.", param="url")
        known = self._fleet.get(pod.name) is not None
        return json_answer(describe(self._fleet.add(pod)), 200 if known else 201)

    async def remove(self, request: web.Request) -> web.Response:
        """202: it goes when its last request has ended, or after the grace time."""
        endpoint = self._named(request)
        self._fleet.remove(endpoint.name)
        return json_answer(describe(endpoint), 202)

    async def drain(self, request: web.Request) -> web.Response:
        endpoint = self._named(request)
        self._fleet.drain(endpoint.name)
        return json_answer(describe(endpoint))

    async def undrain(self, request: web.Request) -> web.Response:
        endpoint = self._named(request)
        self._fleet.undrain(endpoint.name)
        return json_answer(describe(endpoint))

    def _named(self, request: web.Request) -> Endpoint:
        return named(self._fleet, request.match_info["name"])


def named(fleet: Fleet, name: str) -> Endpoint:
    """Raises UnknownPod."""
    endpoint = fleet.get(name)
    if endpoint is None:
        raise UnknownPod(name)
    return endpoint


def describe(endpoint: Endpoint) -> dict[str, Any]:
    """All that may be known of a pod; `view` is what scorers see. Its key is not shown."""
    return {
        "name": endpoint.name,
        "url": endpoint.url,
        "state": endpoint.state.value,
        "role": endpoint.role,
        "weight": endpoint.weight,
        "labels": dict(endpoint.labels),
        "engine": endpoint.engine,
        "models": None if endpoint.models is None else sorted(endpoint.models),
        "metrics": None if endpoint.metrics is NEVER_SCRAPED else _metrics(endpoint.metrics),
        "load": {"requests": endpoint.load.requests, "tokens": endpoint.load.tokens},
        "view": _view(endpoint.view),
    }


def _metrics(metrics: Metrics) -> dict[str, Any]:
    return {
        "freshness": metrics.freshness.value,
        "waiting": metrics.waiting,
        "running": metrics.running,
        "kvUsage": metrics.kv_usage,
        "blockSize": metrics.block_size,
        "blocks": metrics.blocks,
        "activeModels": sorted(metrics.active_models),
        "waitingModels": sorted(metrics.waiting_models),
        "maxActiveModels": metrics.max_active_models,
        "attributes": {key: value for key, value in metrics.attributes.items() if math.isfinite(value)},
    }


def _view(view: LoadView) -> dict[str, Any]:
    return {"waiting": view.waiting, "running": view.running, "kvUsage": view.kv_usage}


def _pod(data: Any) -> PodSettings:
    try:
        return params.load(PodSettings, data)
    except ConfigError as error:
        raise BadRequest("; ".join(map(str, error.problems)), param=error.problems[0].path or None) from None
