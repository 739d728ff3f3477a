"""An API server as far as lists and watches go: versions, pages, selectors, bookmarks, and all that can go wrong."""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import web

from tests.helpers.ports import free_port

Object = dict[str, Any]
CORE, SLICES, POOLS = "api/v1", "apis/discovery.k8s.io/v1", "apis/inference.networking.k8s.io/v1"


class Change(NamedTuple):
    version: int
    where: str
    before: Object | None
    after: Object | None


class FakeApiServer:
    """A Kubernetes API server in the process, to be entered with `async with`.

    Objects are kept by `where`, the path below the host. Each change gets the next version and is remembered until
    `forget`. `statuses` replaces responses by the last part of their path; `watch:PART` replaces watches only."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.objects: dict[str, dict[str, Object]] = {}
        self.version = 100
        self.statuses: dict[str, tuple[int, str]] = {}
        self.token = ""
        self.delay = 0.0
        self.chunk = 0
        """Bytes that are written at once; 0: all."""
        self.mute = False
        """Watches are accepted, but silent, and do not end."""
        self.silenced = 0
        """Events that were not said."""
        self.no_end = False
        """Watches do not end in time."""
        self.gone_by_status = False
        """Of watches that come too late; else it is an event that says so."""
        self.lists: list[Mapping[str, str]] = []
        self.watches: list[Mapping[str, str]] = []
        self.open: dict[web.StreamResponse, tuple[web.Request, asyncio.Queue[Any]]] = {}
        self._history: list[Change] = []
        self._oldest = 0
        self._pages: dict[str, tuple[int, list[Object]]] = {}

    async def __aenter__(self) -> FakeApiServer:
        app = web.Application()
        app.router.add_get("/{where:.*}", self._respond)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        self._port = free_port()
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sever()
        await self._runner.cleanup()

    async def listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await self._site.start()
        self._listens = True

    async def stop_listening(self) -> None:
        """No client gets a response any more: not on open connections, and not on newly accepted ones."""
        self._listens = False
        await self._site.stop()
        self.sever()
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._port}"

    # What happens in the cluster.

    def put(self, where: str, item: Object) -> None:
        """Creates or replaces."""
        name = item["metadata"]["name"]
        self._change(where, self.objects.setdefault(where, {}).get(name), copy.deepcopy(item))

    def delete(self, where: str, name: str) -> None:
        self._change(where, self.objects[where][name], None)

    def forget(self) -> None:
        """Compaction: nothing that came before is known, but what there is."""
        self._oldest = self.version
        self._history.clear()
        self._pages.clear()

    def pass_by(self, changes: int = 1) -> None:
        """So many changes of something else."""
        self.version += changes

    # What happens on the wire.

    def bookmark(self) -> None:
        """To all watches that want it."""
        for request, queue in self.open.values():
            if request.query.get("allowWatchBookmarks") == "true":
                metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
                queue.put_nowait({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}})

    def fail(self, code: int, message: str = "it failed") -> None:
        """In all watches, which then end."""
        for _, queue in self.open.values():
            queue.put_nowait(_error(code, message))
            queue.put_nowait(None)

    def say(self, line: bytes) -> None:
        for _, queue in self.open.values():
            queue.put_nowait(line)

    def sever(self) -> None:
        """Connections of watches end in the middle of whatever it is."""
        for request, _ in list(self.open.values()):
            _abort(request)
        self.open.clear()

    # How it responds.

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        where, watches = request.match_info["where"], request.query.get("watch") == "true"
        part = where.rpartition("/")[2]
        (self.watches if watches else self.lists).append({"where": where, **request.query})
        await asyncio.sleep(self.delay)
        if not self._listens:
            return _abort(request)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        scripted = (self.statuses.get(f"watch:{part}") if watches else None) or self.statuses.get(part)
        if scripted:
            return _status(*scripted)
        return await (self._watch(request, where) if watches else self._list(request, where))

    async def _list(self, request: web.Request, where: str) -> web.StreamResponse:
        token, limit = request.query.get("continue", ""), int(request.query.get("limit", "0"))
        if token and token not in self._pages:
            return _status(410, "The provided continue parameter is too old")
        found = [item for item in self.objects.get(where, {}).values() if _is_selected(item, request.query)]
        version, rest = self._pages.pop(token) if token else (self.version, found)
        page, rest = (rest[:limit], rest[limit:]) if limit else (rest, [])
        metadata = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"{version}:{len(self._pages)}:{len(rest)}"
            self._pages[metadata["continue"]] = (version, rest)
        return web.json_response({"kind": "List", "metadata": metadata, "items": page})

    async def _watch(self, request: web.Request, where: str) -> web.StreamResponse:
        version, lasts = int(request.query["resourceVersion"]), float(request.query["timeoutSeconds"])
        too_old = version < self._oldest
        if too_old and self.gone_by_status:
            return _status(410, "too old resource version")
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        queue: asyncio.Queue[Any] = asyncio.Queue()
        for change in self._history:
            if change.version > version and change.where == where and (event := _event(change, request.query)):
                queue.put_nowait(event)
        if too_old:
            queue.put_nowait(_error(410, "too old resource version: 1 (2)"))
            queue.put_nowait(None)
        await response.prepare(request)
        self.open[response] = (request, queue)
        with suppress(ConnectionError):
            await self._write_all(response, queue, 3600.0 if self.no_end else lasts)
            await response.write_eof()
        self.open.pop(response, None)
        return response

    async def _write_all(self, response: web.StreamResponse, queue: asyncio.Queue[Any], lasts: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(lasts):
                while (event := await queue.get()) is not None or self.no_end:
                    if self.mute:
                        self.silenced += 1
                    else:
                        await self._write(response, event if isinstance(event, bytes) else json.dumps(event).encode())

    async def _write(self, response: web.StreamResponse, line: bytes) -> None:
        line += b"\n"
        size = self.chunk or len(line)
        for at in range(0, len(line), size):
            await response.write(line[at : at + size])
            await asyncio.sleep(0)

    def _change(self, where: str, before: Object | None, after: Object | None) -> None:
        self.version += 1
        known = self.objects.setdefault(where, {})
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
            known[after["metadata"]["name"]] = after
        elif before is not None:
            del known[before["metadata"]["name"]]
        change = Change(self.version, where, before, after)
        self._history.append(change)
        for request, queue in self.open.values():
            if request.match_info["where"] == where and (event := _event(change, request.query)):
                queue.put_nowait(event)


def _abort(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def pods_in(namespace: str = "ns") -> str:
    return f"{CORE}/namespaces/{namespace}/pods"


def slices_in(namespace: str = "ns") -> str:
    return f"{SLICES}/namespaces/{namespace}/endpointslices"


def pools_in(namespace: str = "ns") -> str:
    return f"{POOLS}/namespaces/{namespace}/inferencepools"


def objectives_in(namespace: str = "ns", group: str = "llm-d.ai") -> str:
    return f"apis/{group}/v1alpha2/namespaces/{namespace}/inferenceobjectives"


def rewrites_in(namespace: str = "ns", group: str = "llm-d.ai") -> str:
    return f"apis/{group}/v1alpha2/namespaces/{namespace}/inferencemodelrewrites"


def pod(name: str, address: str = "10.0.0.1", *, uid: str = "", ready: bool = True, **keys: Any) -> Object:
    """`labels`, `annotations`, `deleting`, `phase`, `born`, `node`."""
    metadata: Object = {
        "name": name,
        "uid": uid or f"uid-of-{name}",
        "labels": {"app": "vllm", **keys.get("labels", {})},
        "annotations": keys.get("annotations", {}),
        "creationTimestamp": keys.get("born", "2026-01-01T00:00:00Z"),
    }
    if keys.get("deleting"):
        metadata["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    status: Object = {
        "phase": keys.get("phase", "Running"),
        "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": str(ready)}],
    }
    if address:
        status["podIP"] = address
    return {"metadata": metadata, "spec": {"nodeName": keys.get("node", "node-a")}, "status": status}


def pool(name: str, selector: Mapping[str, str], *ports: int) -> Object:
    spec = {"selector": {"matchLabels": dict(selector)}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": name}, "spec": spec}


def endpoint_slice(name: str, *endpoints: Object, service: str = "vllm", ports: tuple[int, ...] = (8000,)) -> Object:
    labels = {"kubernetes.io/service-name": service, "endpointslice.kubernetes.io/managed-by": "x", "team": "blue"}
    listed = [{"name": f"p{port}", "port": port, "protocol": "TCP"} for port in ports]
    return {"metadata": {"name": name, "labels": labels}, "endpoints": list(endpoints), "ports": listed}


def endpoint(name: str, address: str, **conditions: bool) -> Object:
    target = {"kind": "Pod", "name": name, "uid": f"uid-of-{name}"}
    return {"addresses": [address], "conditions": conditions, "targetRef": target, "nodeName": "node-a", "zone": "z1"}


def _event(change: Change, query: Mapping[str, str]) -> Object | None:
    """An object that leaves the selection is deleted for its watchers, one that enters it is new."""
    before = change.before is not None and _is_selected(change.before, query)
    after = change.after is not None and _is_selected(change.after, query)
    if after:
        return {"type": "MODIFIED" if before else "ADDED", "object": change.after}
    if not before:
        return None
    assert change.before is not None
    metadata = {**change.before["metadata"], "resourceVersion": str(change.version)}
    return {"type": "DELETED", "object": {**change.before, "metadata": metadata}}


def _is_selected(item: Object, query: Mapping[str, str]) -> bool:
    metadata = item["metadata"]
    labels = metadata.get("labels", {})
    wanted = [tuple(one.split("=")) for one in query.get("labelSelector", "").split(",") if one]
    named = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and named in ("", metadata.get("name"))


def _status(code: int, message: str) -> web.Response:
    return web.json_response(_error(code, message)["object"], status=code)


def _error(code: int, message: str) -> Object:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    return {"type": "ERROR", "object": status}
