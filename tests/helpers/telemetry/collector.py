"""A collector of OpenTelemetry as exporters see it: takes OTLP over HTTP, in protobuf, and keeps the spans."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.helpers.waiting import until


@dataclass(frozen=True, slots=True)
class Received:
    """A span. Ids are in hexadecimal, times in nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    status: int
    begins: int
    ends: int
    state: str
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]


class Collector:
    """`async with`. While `takes` is false it refuses everything; while `hangs` it does not respond, and holds so many
    as `held` says."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.bodies: list[bytes] = []
        self.headers: list[Mapping[str, str]] = []
        self.takes = True
        self.hangs = False
        self.held = 0
        self._released = asyncio.Event()

    async def __aenter__(self) -> Collector:
        application = web.Application(client_max_size=1 << 28)
        application.router.add_post("/v1/traces", self._accept)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()
        await self._runner.cleanup()

    def release(self) -> None:
        """Respond to all held requests, and no longer hang."""
        self.hangs = False
        self._released.set()

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]

    async def until(self, number: int) -> None:
        """It has so many spans."""
        await until(lambda: len(self.spans) >= number)

    async def _accept(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self.hangs:
            self.held += 1
            await self._released.wait()
            self.held -= 1
        if not self.takes:
            return web.Response(status=400)
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.bodies.append(body)
        self.headers.append(request.headers)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _plain(of_resource.resource.attributes)
            self.spans.extend(_span(span, resource) for scope in of_resource.scope_spans for span in scope.spans)
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(), content_type="application/x-protobuf"
        )


def _span(span: Any, resource: Mapping[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        status=span.status.code,
        begins=span.start_time_unix_nano,
        ends=span.end_time_unix_nano,
        state=span.trace_state,
        attributes=_plain(span.attributes),
        resource=resource,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
