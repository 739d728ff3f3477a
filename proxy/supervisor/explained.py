"""What workers know of their decisions, as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from proxy import outbound
from proxy.core.errors import BadRequest, NoEndpoints, NotFound, RequestError
from proxy.explain.wanted import Wanted
from proxy.supervisor.child import Child

log = logging.getLogger(__name__)

TIMEOUT = 5.0
"""Seconds for the response of one worker."""

ADDED = ("kept", "bytes", "seen")

_ERRORS: Mapping[int, type[RequestError]] = {400: BadRequest, 404: NotFound}

Said = tuple[int, Any]
"""Status and JSON."""


class WorkersDecisions:
    """Implements `http.admin_decisions.Explained`. One that does not answer is left out."""

    def __init__(self, children: Callable[[], Sequence[Child]]) -> None:
        self._children = children

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises BadRequest."""
        limit = Wanted.of(query).limit
        all_said = [said for status, said in await self._all("/debug/decisions", query) if status == 200]
        if not all_said:
            raise NoEndpoints("No worker answers.")
        decisions = sorted((one for said in all_said for one in said["decisions"]), key=lambda one: -float(one["at"]))
        sums = {name: sum(said[name] for said in all_said) for name in ADDED if name in all_said[0]}
        return {**all_said[0], **sums, "decisions": decisions[:limit]}

    async def shown(self, name: str) -> Mapping[str, Any]:
        """Raises NotFound."""
        answers = await self._all(f"/debug/decisions/{name}", {})
        found = [said for status, said in answers if status == 200]
        if not found:
            raise NotFound(answers[0][1]["error"]["message"] if answers else "No worker answers.")
        return dict(max(found, key=lambda said: float(said["at"])))

    async def imagined(self, asked: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """By one of them: they know the same pods, and tell each other what they do there. Raises RequestError."""
        for child in self._ready():
            answer = await _ask(child, "/debug/explain", query, orjson.dumps(asked))
            if answer is not None:
                status, said = answer
                if status == 200:
                    return dict(said)
                raise _ERRORS.get(status, RequestError)(said["error"]["message"], param=said["error"]["param"])
        raise NoEndpoints("No worker answers.")

    async def _all(self, path: str, query: Mapping[str, str]) -> list[Said]:
        answers = await asyncio.gather(*(_ask(child, path, query) for child in self._ready()))
        return [answer for answer in answers if answer is not None]

    def _ready(self) -> list[Child]:
        return [child for child in self._children() if child.ready.is_set() and not child.leaving.is_set()]


async def _ask(child: Child, path: str, query: Mapping[str, str], body: bytes | None = None) -> Said | None:
    """None if it does not answer."""
    method = "GET" if body is None else "POST"
    url, socket_path = f"http://worker{path}", child.metrics_path
    try:
        response = await outbound.fetch(method, url, TIMEOUT, socket_path=socket_path, params=dict(query), data=body)
        return response.status, orjson.loads(response.body)
    except (*outbound.FAILURES, orjson.JSONDecodeError) as error:
        log.warning("failed to fetch decisions from worker %d: %r", child.seat, error)
        return None
