"""The admin API of pods: their state, their changes, and requests that are relayed to one."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from yarl import URL

from proxy.core import params
from proxy.core.endpoint import DEFAULT_POOL, NEVER_SCRAPED, Endpoint, EndpointState, Load, LoadView, Metrics
from proxy.core.errors import BadGateway, BadRequest, ConfigError, Conflict, GatewayTimeout, UnknownPod
from proxy.core.params import parse_duration
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.http.admin_keys import json_body, json_response
from proxy.http.head import HOP_BY_HOP, PROXY_FIELDS
from proxy.http.service import CREDENTIALS
from proxy.http.settings import PodTlsContexts

log = logging.getLogger(__name__)


LONGEST_WAIT = 600.0
"""Seconds that a response may wait for a pod to drain."""

CHECK_INTERVAL = 0.05

FEW = 8
"""Number of existing pods that the error about an unknown pod lists."""


class PodRoutes:
    def __init__(self, fleet: Fleet, breaker: Callable[[Endpoint], str]) -> None:
        self._fleet = fleet
        self._breaker = breaker

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/pods", self.list)
        router.add_post("/admin/pods", self.add)
        router.add_get("/admin/pods/{name}", self.show)
        router.add_delete("/admin/pods/{name}", self.remove)
        router.add_post("/admin/pods/{name}/drain", self.drain)
        router.add_post("/admin/pods/{name}/undrain", self.undrain)

    async def list(self, request: web.Request) -> web.Response:
        return json_response({"pods": [self._describe(endpoint) for endpoint in self._fleet.pods]})

    async def show(self, request: web.Request) -> web.Response:
        return json_response(self._describe(self._named(request)))

    async def add(self, request: web.Request) -> web.Response:
        """Respond 201 for a new pod, in `pool` or else in the default pool; 200 for an updated pod of this name, which
        stays in its pool unless another is given. Raise Conflict if the pod has another URL: requests, caches and
        learnt values belong to that address."""
        pod, pool = self._pod(await json_body(request))
        for other in self._fleet.pods:
            if other.url == pod.url and other.pod_name != pod.name:
                raise BadRequest(f"The pod '{other.pod_name}' has this URL already.", param="url")
        known = self._fleet.get(pod.name)
        if known is not None and known.url != pod.url and not self._fleet.is_leaving(known):
            raise Conflict(
                f"The pod '{pod.name}' is at another URL. Give this one another name; or, to replace that one, "
                f"DELETE /admin/pods/{quote(pod.name)} first.",
                param="url",
            )
        pool = pool or (DEFAULT_POOL if known is None else known.pool)
        endpoint = self._fleet.add(pod, pool=pool)
        return json_response(self._describe(endpoint), 200 if endpoint is known else 201)

    async def remove(self, request: web.Request) -> web.Response:
        """Respond 202: the pod is removed when its last request has ended, or after the grace time."""
        endpoint = self._named(request)
        self._fleet.remove(endpoint.name)
        return json_response(self._describe(endpoint), 202)

    async def drain(self, request: web.Request) -> web.Response:
        """Drain a pod. With `?wait=30s` respond when its last request has ended, or with 202 after that time."""
        endpoint, seconds = self._named(request), seconds_of(request.query.get("wait", "0s"))
        is_idle = await drained(self._fleet, endpoint, seconds)
        return json_response(self._describe(endpoint), 200 if is_idle or not seconds else 202)

    async def undrain(self, request: web.Request) -> web.Response:
        endpoint = self._named(request)
        self._fleet.undrain(endpoint.name)
        return json_response(self._describe(endpoint))

    def _describe(self, endpoint: Endpoint) -> dict[str, Any]:
        reliability = {"breaker": self._breaker(endpoint), "doubts": self._fleet.ejection_reasons(endpoint)}
        age, failure = self._fleet.scrape_age(endpoint), self._fleet.scrape_failure(endpoint)
        return {**describe(endpoint), **reliability, "scrapeAge": age, "scrapeFailure": failure}

    def _pod(self, data: Any) -> tuple[PodSettings, str]:
        """Return the pod and the pool of the body."""
        pool = data.pop("pool", "") if isinstance(data, dict) else ""
        if pool and pool not in self._fleet.pools:
            raise BadRequest(f"{pool!r} is not one of the pools {', '.join(self._fleet.pools)}.", param="pool")
        try:
            settings = params.load(PodSettings, data)
            if settings.ports:
                raise BadRequest("Add each port as a pod of its own: ports are for files.", param="ports")
            return settings, pool
        except ConfigError as error:
            raise BadRequest("; ".join(map(str, error.problems)), param=error.problems[0].path or None) from None

    def _named(self, request: web.Request) -> Endpoint:
        return named(self._fleet, request.match_info["name"])


async def drained(fleet: Fleet, endpoint: Endpoint, seconds: float) -> bool:
    """Drain a pod. Return whether its last request has ended within `seconds`, on any of its ranks."""
    fleet.drain(endpoint.name)
    for _ in range(round(seconds / CHECK_INTERVAL)):
        if _in_flight(endpoint) <= 0 or endpoint.state is not EndpointState.DRAINING:
            break
        await asyncio.sleep(CHECK_INTERVAL)
    return _in_flight(endpoint) <= 0


def named(fleet: Fleet, name: str) -> Endpoint:
    """Raise UnknownPod."""
    endpoint = fleet.get(name)
    if endpoint is None:
        raise UnknownPod(name, _those_there_are(name, [other.pod_name for other in fleet.pods]))
    return endpoint


def _those_there_are(name: str, names: Sequence[str]) -> str:
    if not names:
        return "; this proxy has no pods."
    if len(names) <= FEW:
        return f"; there {'are' if len(names) > 1 else 'is'} {', '.join(names)}."
    return params.suggestion(name, names) or "; GET /admin/pods lists those there are."


def _in_flight(endpoint: Endpoint) -> int:
    return sum(rank.load.requests for rank in endpoint.ranks)


def describe(endpoint: Endpoint) -> dict[str, Any]:
    """Return the state of a pod without its key; `view` is what scorers see. For a pod with data-parallel ranks, load
    and metrics are sums, KV usage is the mean, and `ranks` has the values of each."""
    if endpoint.rank is None:
        return _pod_of(endpoint, endpoint.name, endpoint.metrics, endpoint.load, endpoint.view)
    ranks = endpoint.ranks
    load = Load(requests=_in_flight(endpoint), tokens=sum(rank.load.tokens for rank in ranks))
    view = LoadView(
        sum(rank.view.waiting for rank in ranks),
        sum(rank.view.running for rank in ranks),
        sum(rank.view.kv_usage for rank in ranks) / len(ranks),
    )
    return {
        **_pod_of(endpoint, endpoint.pod_name, _sum([rank.metrics for rank in ranks]), load, view),
        "ranks": [{"name": rank.name, **_work(rank.metrics, rank.load, rank.view)} for rank in ranks],
    }


def _sum(ranks: Sequence[Metrics]) -> Metrics:
    if ranks[0] is NEVER_SCRAPED:
        return NEVER_SCRAPED
    return replace(
        ranks[0],
        waiting=sum(rank.waiting for rank in ranks),
        running=sum(rank.running for rank in ranks),
        kv_usage=sum(rank.kv_usage for rank in ranks) / len(ranks),
        blocks=sum(rank.blocks for rank in ranks),
        attributes=dict(ranks[0].attributes),
    )


def _pod_of(endpoint: Endpoint, name: str, metrics: Metrics, load: Load, view: LoadView) -> dict[str, Any]:
    return {
        "name": name,
        "url": endpoint.url,
        "pool": endpoint.pool,
        "state": endpoint.state.value,
        "role": endpoint.role,
        "weight": endpoint.weight,
        "labels": dict(endpoint.labels),
        "engine": endpoint.engine,
        "models": None if endpoint.models is None else sorted(endpoint.models),
        **_work(metrics, load, view),
    }


def _work(metrics: Metrics, load: Load, view: LoadView) -> dict[str, Any]:
    return {
        "metrics": None if metrics is NEVER_SCRAPED else _metrics(metrics),
        "load": {"requests": load.requests, "tokens": load.tokens},
        "view": {"waiting": view.waiting, "running": view.running, "kvUsage": view.kv_usage},
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


def seconds_of(text: str) -> float:
    """Raise BadRequest."""
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise BadRequest(f"wait: {error}", param="wait") from None
    if seconds > LONGEST_WAIT:
        raise BadRequest(f"wait: {LONGEST_WAIT:g} s at most", param="wait")
    return seconds


TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=5)
"""Loading an adapter or waking an engine takes minutes."""

_NOT_PASSED_ON = frozenset(name.decode() for name in HOP_BY_HOP | PROXY_FIELDS | CREDENTIALS) | {
    "host",
    "content-length",
    "expect",
    # Control responses are small, and a session that decompresses would contradict their headers.
    "accept-encoding",
}

_NOT_FROM_PODS = _NOT_PASSED_ON | {"set-cookie", "clear-site-data"}
"""With `access-control-*`: a pod must not decide which pages may read responses of the admin port."""

_UNTRUSTED = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
"""A browser would execute content of a pod as a page of the admin port, which may change everything here."""


class PodRelay:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, pod_tls: PodTlsContexts) -> None:
        self._fleet = fleet
        self._session = session
        self._pod_tls = pod_tls

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Raise UnknownPod, BadGateway or GatewayTimeout. A response that breaks off is cut here too."""
        endpoint = named(self._fleet, request.match_info["name"])
        response: web.StreamResponse | None = None
        try:
            context, name = self._pod_tls.of(endpoint) if endpoint.url.startswith("https:") else (True, None)
            async with self._session.request(
                request.method,
                _target(endpoint, request),
                headers=list(_headers(endpoint, request)),
                data=await request.read() or None,
                allow_redirects=False,
                timeout=TIMEOUT,
                ssl=context,
                server_hostname=name,
            ) as upstream:
                response = _head(upstream, decompressed=self._session.auto_decompress)
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            if response is None and isinstance(error, TimeoutError):
                raise GatewayTimeout(f"The pod '{endpoint.name}' did not respond in time.") from error
            if response is None:
                why = type(error).__name__
                raise BadGateway(f"The pod '{endpoint.name}' did not respond: {why}.") from error
            if request.transport is None or request.transport.is_closing():
                return response  # the viewer left
            log.warning("admin: the response of pod %s to %s broke off: %r", endpoint.name, request.path, error)
            request.transport.abort()
        return response


def _target(endpoint: Endpoint, request: web.Request) -> URL:
    """Return the rest of the path and the query as the client wrote them."""
    _, _, _, _, _, tail = request.rel_url.raw_path.split("/", 5)
    query = request.rel_url.raw_query_string
    return URL(f"{endpoint.url}/{tail}{'?' + query if query else ''}", encoded=True)


def _headers(endpoint: Endpoint, request: web.Request) -> Iterator[tuple[str, str]]:
    for name, value in request.headers.items():
        if name.lower() not in _NOT_PASSED_ON:
            yield name, value
    yield "accept-encoding", "identity"
    if endpoint.api_key is not None:
        yield "authorization", f"Bearer {endpoint.api_key}"


def _head(upstream: aiohttp.ClientResponse, decompressed: bool) -> web.StreamResponse:
    response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
    dropped = _NOT_FROM_PODS | {"content-encoding"} if decompressed else _NOT_FROM_PODS
    for name, value in upstream.headers.items():
        if (lower := name.lower()) not in dropped and not lower.startswith("access-control-"):
            response.headers.add(name, value)
    response.headers.update(_UNTRUSTED)
    return response
