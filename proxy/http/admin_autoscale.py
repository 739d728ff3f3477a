"""/autoscale: what is recommended, for KEDA, people and whoever else scales; and what they have to say to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from proxy.autoscale.decision import Decision
from proxy.autoscale.loop import Loop
from proxy.core.errors import BadRequest, Forbidden, NotFound
from proxy.core.params import suggestion
from proxy.core.units import parse_duration
from proxy.fleet.store import Fleet
from proxy.http.admin_keys import UNKNOWN, WHO, audit, json_answer, json_body
from proxy.http.admin_pods import LOOK_INTERVAL, describe, named, seconds_of

LONGEST_ORDER = 86400.0
"""Seconds for which an operator's order may hold."""

LATEST = 100
"""Decisions of the history that are shown unless more are asked for."""


class Scaled(Protocol):
    """`composition.scaled_pool.ScaledPool` is one."""

    @property
    def loop(self) -> Loop: ...
    def described(self, decision: Decision) -> dict[str, Any]: ...
    def acknowledge(self, decision: int, roles: Mapping[str, int]) -> None:
        """Raises BadRequest."""


class AutoscaleRoutes:
    """`pools` are those with a policy."""

    def __init__(self, pools: Callable[[], Mapping[str, Scaled]], fleet: Fleet) -> None:
        self._pools = pools
        self._fleet = fleet

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/autoscale/pools", self.list)
        router.add_get("/autoscale/pools/{pool}", self.show)
        router.add_get("/autoscale/pools/{pool}/history", self.history)
        router.add_post("/autoscale/pools/{pool}/pause", self.pause)
        router.add_post("/autoscale/pools/{pool}/resume", self.resume)
        router.add_post("/autoscale/pools/{pool}/override", self.override)
        router.add_post("/autoscale/pools/{pool}/ack", self.acknowledge)
        router.add_get("/autoscale/drain/{pod}", self.drain)

    async def list(self, request: web.Request) -> web.Response:
        return json_answer({"pools": list(self._pools())})

    async def show(self, request: web.Request) -> web.Response:
        """The latest decision; 503 before there is one. One that is not valid is 200 all the same: to KEDA an error is
        a failure, and the last values are good."""
        pool = self._named(request)
        decision = pool.loop.latest
        if decision is None:
            return _uncached(json_answer({"pool": request.match_info["pool"], "valid": False}, 503))
        tag = f'"{decision.id}"'
        if request.headers.get("if-none-match") == tag:
            answer = web.Response(status=304)
        else:
            controls = pool.loop.controls
            outcomes = {role: outcome.value for role, outcome in pool.loop.outcomes.items()}
            more = {"paused": controls.paused, "outcomes": outcomes, "acknowledged": _acknowledged(pool.loop)}
            answer = json_answer({**pool.described(decision), **more})
        answer.headers["etag"] = tag
        return _uncached(answer)

    async def history(self, request: web.Request) -> web.Response:
        """The latest `?n=` decisions, the oldest first; `kvlane autoscale replay` reads them."""
        count = _number(request.query.get("n", str(LATEST)))
        decisions = list(self._named(request).loop.history)[-count:]
        return _uncached(json_answer({"decisions": [one.as_dict() for one in decisions]}))

    async def pause(self, request: web.Request) -> web.Response:
        controls = self._named(request).loop.controls
        controls.pause()
        return json_answer({"paused": controls.paused})

    async def resume(self, request: web.Request) -> web.Response:
        controls = self._named(request).loop.controls
        controls.resume()
        return json_answer({"paused": controls.paused})

    async def override(self, request: web.Request) -> web.Response:
        """`{"roles": {"decode": 8}, "ttl": "30m"}`."""
        controls, body = self._named(request).loop.controls, await json_body(request)
        seconds = _ttl(body.get("ttl") if isinstance(body, dict) else None)
        controls.override(_counts(body), seconds)
        return json_answer({"overrides": controls.overrides(), "seconds": seconds})

    async def acknowledge(self, request: web.Request) -> web.Response:
        """`{"decision_id": 1841, "roles": {"decode": 8}}`: somebody has brought these roles to these sizes."""
        pool, body = self._named(request), await json_body(request)
        counts = _counts(body)
        decision = body.get("decision_id")
        if not isinstance(decision, int) or isinstance(decision, bool):
            raise BadRequest("decision_id must be a whole number.", param="decision_id")
        pool.acknowledge(decision, counts)
        return json_answer({"acknowledged": _acknowledged(pool.loop)})

    async def drain(self, request: web.Request) -> web.Response:
        """For a `preStop` hook, which can only GET: the pod gets no new requests, and this is answered when its last
        one has ended, or 202 after `?wait=`."""
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("A page of another site may not drain pods.")
        endpoint, seconds = named(self._fleet, request.match_info["pod"]), seconds_of(request.query.get("wait", "0s"))
        self._fleet.drain(endpoint.name)
        audit.info("drain of pod %s by %r from %s", endpoint.name, request.get(WHO, UNKNOWN), request.remote)
        for _ in range(round(seconds / LOOK_INTERVAL)):
            if endpoint.load.requests <= 0:
                break
            await asyncio.sleep(LOOK_INTERVAL)
        return _uncached(json_answer(describe(endpoint), 202 if endpoint.load.requests > 0 else 200))

    def _named(self, request: web.Request) -> Scaled:
        """Raises NotFound."""
        name, pools = request.match_info["pool"], self._pools()
        if name not in pools:
            raise NotFound(f"No pool '{name}' is scaled{suggestion(name, list(pools))}.")
        return pools[name]


def _uncached(answer: web.Response) -> web.Response:
    answer.headers["cache-control"] = "no-store"
    return answer


def _acknowledged(loop: Loop) -> dict[str, Any] | None:
    found = loop.controls.acknowledged
    return None if found is None else {"decision_id": found.decision, "roles": dict(found.roles), "ts": found.at}


def _counts(body: Any) -> dict[str, int]:
    """Raises BadRequest."""
    roles = body.get("roles") if isinstance(body, dict) else None
    if not isinstance(roles, dict) or not roles:
        raise BadRequest("roles must be an object with a number for at least one role.", param="roles")
    for role, count in roles.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise BadRequest(f"roles.{role} must be a whole number.", param=f"roles.{role}")
    return roles


def _ttl(written: Any) -> float:
    """Seconds. Raises BadRequest."""
    try:
        seconds = parse_duration(written) if isinstance(written, str) else float(written)
    except (TypeError, ValueError):
        raise BadRequest("ttl must be a duration, such as 30m.", param="ttl") from None
    if not 0 < seconds <= LONGEST_ORDER:
        raise BadRequest(f"ttl must be more than 0, and {LONGEST_ORDER:g} s at most.", param="ttl")
    return seconds


def _number(text: str) -> int:
    """Raises BadRequest."""
    if not text.isdecimal() or not int(text):
        raise BadRequest("n must be a whole number above 0.", param="n")
    return int(text)
