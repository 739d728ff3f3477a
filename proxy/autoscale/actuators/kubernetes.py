"""Scales by the scale subresource of Kubernetes, over plain HTTP with the token of the pod."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from proxy.autoscale.acting import SERVICE_ACCOUNT, path_of
from proxy.autoscale.actuators.order import Hand, Order
from proxy.autoscale.loop import Outcome

log = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
DOOMED, SPARED = "-1000", "0"
"""Of the pods that a ReplicaSet deletes, those with the lowest cost go first. StatefulSets do not ask."""

MERGE = {"content-type": "application/merge-patch+json"}

_BUSY, _TOO_MANY, _GONE = 409, 429, 404


class Kubernetes(Hand):
    """`targets` by role: `deployment/NAME`, `statefulset/NAME`, or `GROUP/VERSION/RESOURCE/NAME` for anything with a
    scale subresource. Needs `get` and `patch` on that, and `patch` on pods for the deletion cost."""

    def __init__(
        self,
        targets: Mapping[str, str],
        timeout: float,
        server: str = "",
        namespace: str = "",
        token_file: str = "",
        ca_file: str = "",
    ) -> None:
        self._paths = {role: path_of(target) for role, target in targets.items()}
        self._server = (server or in_cluster()).rstrip("/")
        self._namespace = namespace
        self._token_file = Path(token_file or f"{SERVICE_ACCOUNT}/token")
        self._ca_file = Path(ca_file or f"{SERVICE_ACCOUNT}/ca.crt")
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def scale(self, order: Order) -> Outcome:
        """What was changed since it was read is left for the next time."""
        async with await self._session() as session:
            url = await self._url(order.role)
            status, scale = await _json(session.get(url))
            if status != 200:
                return _outcome(status, url)
            if scale.get("spec", {}).get("replicas", 0) == order.count:
                return Outcome.OK
            version = scale.get("metadata", {}).get("resourceVersion")
            patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": order.count}}
            status, _ = await _json(session.patch(url, json=patch, headers=MERGE))
            return _outcome(status, url)

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        patch = {"metadata": {"annotations": {DELETION_COST: DOOMED if doomed else SPARED}}}
        namespace = await self._in()
        async with await self._session() as session:
            for pod in pods:
                url = f"{self._server}/api/v1/namespaces/{namespace}/pods/{pod.rpartition('/')[2]}"
                status, _ = await _json(session.patch(url, json=patch, headers=MERGE))
                if status >= 300 and (doomed or status != _GONE):
                    log.warning("pod %s: no deletion cost, the API server answered %d", pod, status)

    async def _url(self, role: str) -> str:
        group, name = self._paths[role]
        api, _, resource = group.rpartition("/")
        return f"{self._server}/apis/{api}/namespaces/{await self._in()}/{resource}/{name}/scale"

    async def _session(self) -> aiohttp.ClientSession:
        """With the token as it is now: the file is replaced within the hour."""
        token = (await asyncio.to_thread(self._token_file.read_text)).strip()
        tls = self._server.startswith("https:")
        context: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(self._ca_file)) if tls else True
        return aiohttp.ClientSession(
            timeout=self._timeout,
            headers={"authorization": f"Bearer {token}", "accept": "application/json"},
            connector=aiohttp.TCPConnector(ssl=context),
        )

    async def _in(self) -> str:
        if not self._namespace:
            self._namespace = (await asyncio.to_thread(Path(f"{SERVICE_ACCOUNT}/namespace").read_text)).strip()
        return self._namespace


def in_cluster() -> str:
    """The API server, as Kubernetes tells every container."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


async def _json(asking: Any) -> tuple[int, dict[str, Any]]:
    async with asking as answer:
        said = await answer.json(content_type=None) if answer.status < 300 else None
        return answer.status, said if isinstance(said, dict) else {}


def _outcome(status: int, url: str) -> Outcome:
    if status < 300:
        return Outcome.OK
    if status in (_BUSY, _TOO_MANY):
        return Outcome.BUSY
    log.warning("%s: the API server answered %d", url, status)
    return Outcome.REFUSED if status in (401, 403, 404, 422) else Outcome.ERROR
