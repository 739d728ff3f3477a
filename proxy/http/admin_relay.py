"""/admin/pods/{name}/proxy/…: the control paths of one pod, which the data port does not relay."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import aiohttp
from aiohttp import web
from yarl import URL

from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadGateway, GatewayTimeout
from proxy.fleet.datastore import Fleet
from proxy.http.admin_pods import named
from proxy.http.upstream.trust import Trust

log = logging.getLogger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=5)
"""Loading an adapter or waking an engine takes minutes."""

_NOT_PASSED_ON = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
        "expect",
        # The key of the admin port is not for the pod.
        "authorization",
        "x-api-key",
        "api-key",
        # Control answers are small, and a session that decompresses would contradict their headers.
        "accept-encoding",
    }
)

_NOT_FROM_PODS = frozenset({*_NOT_PASSED_ON, "set-cookie", "clear-site-data"})
"""Together with `access-control-*`: which pages may read responses of the admin port is not for a pod to say."""

_UNTRUSTED = {"content-security-policy": "default-src 'none'; sandbox", "x-content-type-options": "nosniff"}
"""A browser would run what a pod sends as a page of the admin port, which may change everything here."""


class PodRelay:
    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession, trust: Trust) -> None:
        self._fleet = fleet
        self._session = session
        self._trust = trust

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Raises UnknownPod, BadGateway or GatewayTimeout; an answer that breaks off is cut off here too."""
        endpoint = named(self._fleet, request.match_info["name"])
        answer: web.StreamResponse | None = None
        try:
            context, name = self._trust.of(endpoint) if endpoint.url.startswith("https:") else (True, None)
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
                answer = _head(upstream, decompressed=self._session.auto_decompress)
                await answer.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
        except (aiohttp.ClientError, OSError) as error:
            if answer is None:
                raise _failure(endpoint, error) from error
            log.warning("admin: the answer of pod %s to %s broke off: %r", endpoint.name, request.path, error)
            _cut(request)
        return answer


def _target(endpoint: Endpoint, request: web.Request) -> URL:
    """The rest of the path and the query as the client wrote them."""
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
    answer = web.StreamResponse(status=upstream.status, reason=upstream.reason)
    dropped = _NOT_FROM_PODS | {"content-encoding"} if decompressed else _NOT_FROM_PODS
    for name, value in upstream.headers.items():
        if (lower := name.lower()) not in dropped and not lower.startswith("access-control-"):
            answer.headers.add(name, value)
    answer.headers.update(_UNTRUSTED)
    return answer


def _failure(endpoint: Endpoint, error: Exception) -> BadGateway | GatewayTimeout:
    if isinstance(error, TimeoutError):
        return GatewayTimeout(f"The pod '{endpoint.name}' did not answer in time.")
    return BadGateway(f"The pod '{endpoint.name}' did not answer: {type(error).__name__}.")


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()
