"""Engines that fail in their own ways, on real sockets: what their clients see, and what is known of the pods."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from proxy.app import App
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.reliability import health
from proxy.reliability.breaker import LEAVING
from proxy.reliability.health import STALLED, UNHEALTHY
from proxy.settings import from_mapping
from tests.helpers.http.support import SSE_HEAD, Pod, Received, event, plain
from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import CHAT, running
from tests.helpers.waiting import until

FAST: Mapping[str, Any] = {
    "pods": {"refresh": {"interval": "20ms"}},
    "reliability": {"health": {"interval": "50ms", "stall": "500ms"}, "timeouts": {"idle": "400ms"}},
}


class Engine:
    """A scripted server: an API that always responds, and an engine behind it that may not."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokens = 0
        self.frozen = False
        self.unwell = False
        self.shutting_down = False
        self.is_closed = False
        self.events = 0
        """Of a stream, after the first."""
        self.requests = 0
        self.pod = Pod(self._script)

    def close_port(self) -> None:
        """And connections that nothing is under way on."""
        self.is_closed = True
        self.pod._server.close()

    async def _script(self, request: Received) -> None:
        if self.is_closed:
            request.break_off()
            return
        body = await request.body()
        path = request.line.split()[1].decode()
        if path == "/metrics":
            metrics = f"vllm:num_requests_running 1\nvllm:generation_tokens_total {self.tokens}\n"
            await request.send(plain(metrics.encode()))
        elif path == "/v1/models":
            await request.send(plain(json.dumps({"data": [{"id": "m"}]}).encode()))
        elif path == "/health":
            await request.send(plain().replace(b"200 OK", b"503 Unwell" if self.unwell else b"200 OK"))
        else:
            await self._infer(request, json.loads(body))

    async def _infer(self, request: Received, body: dict[str, Any]) -> None:
        self.requests += 1
        if self.shutting_down:
            error = b'{"error":{"message":"cannot schedule new futures after shutdown"}}'
            await request.send(plain(error).replace(b"200 OK", b"500 Internal Server Error"))
            return
        if body.get("stream"):
            await request.send(SSE_HEAD + event(self.name))
            await request.send(*(event(str(number)) for number in range(self.events)), pause=0.05)
        if self.frozen:
            await request.gone()
            request.break_off()
            return
        self.tokens += 1
        if body.get("stream"):
            await request.send(event("[DONE]") + b"0\r\n\r\n")
        else:
            await request.send(plain(json.dumps({"by": self.name}).encode()))


class World:
    def __init__(self, app: App, engines: list[Engine], http: aiohttp.ClientSession) -> None:
        self.app, self.engines, self.http = app, engines, http
        self.url = f"http://127.0.0.1:{app.port}"
        self.admin = f"http://127.0.0.1:{app.admin_port}"

    def pod(self, number: int) -> Endpoint:
        endpoint = self.app.fleet.get(f"pod-{number}")
        assert endpoint is not None
        return endpoint

    def ejection_reasons(self, number: int) -> list[str]:
        return list(self.app.fleet.ejection_reasons(self.pod(number)))

    async def ask(self, **fields: Any) -> tuple[int, str, str]:
        """Send a request. Return its status, pod and body."""
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], **fields}
        async with self.http.post(self.url + CHAT, json=body) as response:
            return response.status, response.headers.get("x-kvlane-endpoint", ""), await response.text()

    async def ask_both(self, **fields: Any) -> list[tuple[int, str, str]]:
        """Send so many requests that both pods get some."""
        return await asyncio.gather(*(self.ask(**fields) for _ in range(12)))

    async def show(self, number: int) -> dict[str, Any]:
        async with self.http.get(f"{self.admin}/admin/pods/pod-{number}") as response:
            found: dict[str, Any] = await response.json()
            return found


@asynccontextmanager
async def world(settings: Mapping[str, Any] = FAST) -> AsyncIterator[World]:
    engines = [Engine("pod-0"), Engine("pod-1")]
    async with (
        engines[0].pod as a,
        engines[1].pod as b,
        running([a.endpoint.url, b.endpoint.url], settings) as app,
        aiohttp.ClientSession() as http,
    ):
        yield World(app, engines, http)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENT", 0.3)
    monkeypatch.setattr(health, "CHECK_INTERVAL", 0.05)
    monkeypatch.setattr("proxy.http.response.ASK_AFTER", 0.05)


async def test_requests_on_a_frozen_engine_are_served_by_another(impatient: None) -> None:
    async with world() as w:
        w.engines[0].frozen = True
        responses = await w.ask_both()
        assert {(status, pod) for status, pod, _ in responses} == {(200, "pod-1")}
        assert w.engines[0].requests
        shown = await w.show(0)
        assert shown["state"] == "ejected"
        assert STALLED in shown["doubts"]
        assert (await w.ask())[1] == "pod-1"
        w.engines[0].frozen = False
        w.engines[0].tokens += 1
        await until(lambda: STALLED not in w.ejection_reasons(0))


async def test_a_stream_on_a_frozen_engine_ends_with_an_error_event(impatient: None) -> None:
    async with world() as w:
        for engine in w.engines:
            engine.frozen = True
        status, _, text = await w.ask(stream=True)
        assert status == 200
        assert '"error"' in text
        assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_silent_responses_of_a_refusing_pod_do_not_hang(impatient: None, stream: bool) -> None:
    """A killed vLLM closes its port at once, and leaves its responses open for as long as their clients wait."""
    patient = {"pods": FAST["pods"]}
    async with world(patient) as w:
        for engine in w.engines[: 2 if stream else 1]:
            engine.frozen = True
        task = asyncio.gather(*(w.ask(stream=stream) for _ in range(12)))
        await until(lambda: all(engine.requests for engine in w.engines))
        w.engines[0].close_port()
        await until(lambda: w.pod(0).state is EndpointState.EJECTED)
        if not stream:
            assert {(status, pod) for status, pod, _ in await task} == {(200, "pod-1")}
            return
        w.engines[1].close_port()
        for status, _, text in await task:
            assert status == 200
            assert '"error"' in text
            assert "[DONE]" not in text


async def test_a_server_that_closes_its_port_finishes_its_streams(impatient: None) -> None:
    async with world({"pods": FAST["pods"]}) as w:
        for engine in w.engines:
            engine.events = 30
        task = asyncio.ensure_future(w.ask(stream=True))
        await until(lambda: any(engine.requests for engine in w.engines))
        for engine in w.engines:
            engine.close_port()
        await until(lambda: not w.app.fleet.ready)
        status, _, text = await task
        assert status == 200
        assert text.endswith("data: 29\n\ndata: [DONE]\n\n")


async def test_an_unhealthy_pod_gets_no_requests_until_it_is_healthy() -> None:
    async with world() as w:
        w.engines[0].unwell = True
        await until(lambda: w.ejection_reasons(0) == [UNHEALTHY])
        assert {pod for _, pod, _ in await w.ask_both()} == {"pod-1"}
        w.engines[0].unwell = False
        await until(lambda: not w.ejection_reasons(0))
        async with w.http.get(f"{w.admin}/metrics") as response:
            text = await response.text()
        assert 'kvlane_endpoint_check_failures_total{check="health",endpoint="pod-0"}' in text
        assert 'kvlane_endpoint_transitions_total{endpoint="pod-0",state="ejected"} 1.0' in text


async def test_a_pod_that_shuts_down_is_avoided_although_healthy() -> None:
    async with world() as w:
        w.engines[0].shutting_down = True
        responses = await w.ask_both()
        assert {(status, pod) for status, pod, _ in responses} == {(200, "pod-1")}
        assert LEAVING in w.ejection_reasons(0)
        before = w.engines[0].requests
        await w.ask_both()
        assert w.engines[0].requests == before
        shown = await w.show(0)
        assert LEAVING in shown["doubts"]


async def test_without_a_pod_the_port_is_open_and_the_first_pod_is_used_soon() -> None:
    engine = Engine("pod-0")
    pod_port = free_port()
    async with running([f"http://127.0.0.1:{pod_port}"]) as app, aiohttp.ClientSession() as http:
        for port, path, status in (
            (app.port, "/health", 503),
            (app.admin_port, "/readyz", 503),
            (app.admin_port, "/healthz", 200),
        ):
            async with http.get(f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == status
        async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json={"model": "m", "messages": []}) as response:
            assert (response.status, response.headers["x-kvlane-reason"]) == (503, "rejected-no-endpoints")
        late = await asyncio.start_server(engine.pod._serve, "127.0.0.1", pod_port)
        try:
            await until(lambda: bool(app.fleet.ready))
        finally:
            late.close()
            for task in tuple(engine.pod._tasks):
                task.cancel()


async def test_the_port_is_open_while_silent_pods_are_tried() -> None:
    received = asyncio.Event()

    async def silent(request: Received) -> None:
        await received.wait()
        await request.send(plain())

    async with Pod(silent) as pod:
        pods = {"static": [{"url": pod.endpoint.url}], "refresh": {"timeout": "30s"}}
        settings = {"listen": {"host": "127.0.0.1", "port": 0}, "pods": pods}
        app = App(from_mapping({**settings, "admin": {"port": 0}, "telemetry": {"accessLog": False}}))
        started = asyncio.Event()
        starting = asyncio.create_task(_within(app, started))
        await until(lambda: bool(getattr(getattr(app, "_server", None), "_port_servers", None)))
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{app.port}/health") as response:
            assert response.status == 503
        received.set()
        started.set()
        await starting


async def _within(app: App, until_set: asyncio.Event) -> None:
    async with app:
        await until_set.wait()
