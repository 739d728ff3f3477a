"""Scales by the scale subresource of Kubernetes, over plain HTTP with the token of the pod."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from proxy import outbound
from proxy.autoscale.acting import path_of
from proxy.autoscale.actuators.order import Hand, Order
from proxy.autoscale.loop import Outcome
from proxy.kubernetes.api import open_session
from proxy.kubernetes.settings import Access

log = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
DOOMED, SPARED = "-1000", "0"
"""Of the pods that a ReplicaSet deletes, those with the lowest cost go first. StatefulSets do not ask."""

MERGE = {"content-type": "application/merge-patch+json"}

_BUSY, _TOO_MANY, _GONE = 409, 429, 404

_RANK = re.compile(r"-rank-\d+$")
"""What discovery adds to the name of a pod for each of its ports, where it has several."""


class Kubernetes(Hand):
    """`targets` by role: `deployment/NAME`, `statefulset/NAME`, or `GROUP/VERSION/RESOURCE/NAME` for anything with a
    scale subresource. Needs `get` and `patch` on that, and `patch` on pods for the deletion cost."""

    def __init__(self, targets: Mapping[str, str], timeout: float, access: Access) -> None:
        self._paths = {role: path_of(target) for role, target in targets.items()}
        self.access = access
        self._timeout = timeout

    async def scale(self, order: Order) -> Outcome:
        """What was changed since it was read is left for the next time."""
        async with await open_session(self.access, self._timeout) as session:
            url = await self._url(order.role)
            status, scale = await _json(session, "GET", url)
            if status != 200:
                return _outcome(status, url)
            if scale.get("spec", {}).get("replicas", 0) == order.count:
                return Outcome.OK
            version = scale.get("metadata", {}).get("resourceVersion")
            patch = {"metadata": {"resourceVersion": version}, "spec": {"replicas": order.count}}
            status, _ = await _json(session, "PATCH", url, patch)
            return _outcome(status, url)

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        patch = {"metadata": {"annotations": {DELETION_COST: DOOMED if doomed else SPARED}}}
        root = f"{self.access.url}/api/v1/namespaces/{await self._namespace()}/pods"
        async with await open_session(self.access, self._timeout) as session:
            for pod in pods:
                status = _GONE
                for name in _names(pod.rpartition("/")[2]):
                    if status == _GONE:
                        status, _ = await _json(session, "PATCH", f"{root}/{name}", patch)
                if status >= 300 and (doomed or status != _GONE):
                    log.warning("pod %s: no deletion cost, the API server answered %d", pod, status)

    async def _url(self, role: str) -> str:
        group, name = self._paths[role]
        api, _, resource = group.rpartition("/")
        return f"{self.access.url}/apis/{api}/namespaces/{await self._namespace()}/{resource}/{name}/scale"

    async def _namespace(self) -> str:
        return await asyncio.to_thread(self.access.own_namespace)


def _names(pod: str) -> tuple[str, ...]:
    """The pod may be called so itself; else it is one of its ranks, and the pod goes with all of them."""
    without = _RANK.sub("", pod)
    return (pod,) if without == pod else (pod, without)


async def _json(
    session: aiohttp.ClientSession, method: str, url: str, patch: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    headers = None if patch is None else MERGE
    response = await outbound.send(session, method, url, json=patch, headers=headers)
    said = orjson.loads(response.body) if response.body and response.status < 300 else None
    return response.status, said if isinstance(said, dict) else {}


def _outcome(status: int, url: str) -> Outcome:
    if status < 300:
        return Outcome.OK
    if status in (_BUSY, _TOO_MANY):
        return Outcome.BUSY
    log.warning("%s: the API server answered %d", url, status)
    return Outcome.REFUSED if status in (401, 403, 404, 422) else Outcome.ERROR
