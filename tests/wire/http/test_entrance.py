"""Authentication at the data port: by the head, before the body is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from proxy.auth import authenticator as auth
from proxy.core.endpoint import update
from proxy.core.errors import Forbidden, Reason, Unauthorized
from proxy.core.listener import Listeners
from proxy.core.ports import Identity, SystemClock
from proxy.gateway import Gateway
from proxy.http.server import DataPortConfig, DataServer
from proxy.http.settings import ListenSettings, SecuritySettings
from proxy.http.upstream.pool import UpstreamPool
from tests.helpers.http.support import CHAT, PATIENT, FakeGateway, Noted, Pod, Rig, answering, plain, post
from tests.helpers.waiting import until

TEAM = Identity("team", "acme", frozenset(("llama-*",)))
KEY = "authorization: Bearer right"


class Authenticator:
    """`Bearer right` opens it, `Bearer later` once it has waited."""

    def __init__(self) -> None:
        self.turn = asyncio.Event()

    def find(self, headers: Mapping[str, str]) -> Identity | None:
        brought = headers.get("authorization") or headers.get("x-api-key")
        if brought in ("Bearer right", "right"):
            return TEAM
        if brought == "Bearer later":
            return None
        if brought == "Bearer admin":
            raise Forbidden("this is for something else")
        raise Unauthorized("who are you?")

    async def authenticate(self, headers: Mapping[str, str]) -> Identity:
        identity = self.find(headers)
        if identity is None:
            await self.turn.wait()
        return TEAM


class Guarded(Rig):
    authenticator: Authenticator


@asynccontextmanager
async def guarded(*pods: Pod, **listen: Any) -> AsyncIterator[Guarded]:
    gateway = FakeGateway([pod.endpoint for pod in pods], cards=[{"id": "llama-8b"}, {"id": "qwen"}])
    noted = Noted()
    authenticator = Authenticator()
    server = DataServer(
        ListenSettings(host="127.0.0.1", port=0, **listen),
        DataPortConfig(
            cast(Gateway, gateway),
            SecuritySettings(),
            PATIENT,
            Listeners([noted]),
            gateway.retries_instead,
            authenticator=cast(auth.Authenticator, authenticator),
        ),
        SystemClock(),
        UpstreamPool(PATIENT.connect, SystemClock()),
    )
    await server.start()
    rig = Guarded(server, gateway, noted.first_bytes, noted.ended)
    rig.authenticator = authenticator
    try:
        yield rig
    finally:
        await server.stop(grace=0)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (CHAT, {"error": {"type": "authentication_error", "code": "invalid_api_key"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "authentication_error"}}),
    ],
)
async def test_a_refusal_has_the_shape_of_the_api(path: str, shape: dict[str, Any]) -> None:
    async with guarded() as rig:
        seen = await rig.ask(post(path))
        assert seen.status == 401
        assert seen.all("www-authenticate") == ["Bearer"]
        assert shape["error"].items() <= seen.json()["error"].items()
        assert rig.ended[-1].outcome is Reason.UNAUTHORIZED
        assert rig.gateway.calls == []


async def test_a_key_without_the_scope_is_403() -> None:
    async with guarded() as rig:
        assert (await rig.ask(post(CHAT, b"{}", "authorization: Bearer admin"))).status == 403


@pytest.mark.parametrize(
    "framing",
    [
        "content-length: 50000000",
        "content-length: 1000",
        "transfer-encoding: chunked",
        "content-length: 1000\r\nexpect: 100-continue",
        "content-length: 1000\r\ncontent-type: multipart/form-data; boundary=x",
    ],
)
@pytest.mark.parametrize("beginning", [b"", b"5\r\n"])
async def test_a_client_is_refused_before_its_body_is_read(framing: str, beginning: bytes) -> None:
    async with guarded() as rig, rig.client() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: kvlane\r\n{framing}\r\n\r\n".encode() + beginning)
        response = await client.response()
        assert response.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in response
        assert rig.server.retained == 0


async def test_a_head_in_pieces_is_authenticated() -> None:
    async with guarded() as rig, rig.client() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: kv".encode())
        await asyncio.sleep(0.02)
        client.send(b"lane\r\ncontent-length: 1000\r\n\r\n")
        assert (await client.response()).startswith(b"HTTP/1.1 401 ")


async def test_a_refusal_keeps_the_connection_of_a_complete_request() -> None:
    async with Pod(answering(plain())) as pod, guarded(pod) as rig, rig.client() as client:
        client.send(post(close=False))
        assert (await client.response()).startswith(b"HTTP/1.1 401 ")
        client.send(post(CHAT, b'{"model":"m"}', KEY, close=False))
        assert (await client.response()).startswith(b"HTTP/1.1 200 ")


async def test_each_request_of_a_connection_is_authenticated() -> None:
    async with Pod(answering(plain())) as pod, guarded(pod) as rig, rig.client() as client:
        client.send(post(CHAT, b"{}", KEY, close=False) + post(close=False))
        assert (await client.response()).startswith(b"HTTP/1.1 200 ")
        assert (await client.response()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("size", [13, 300_000])
async def test_the_clients_key_is_not_sent_to_the_pod(size: int) -> None:
    headers = (KEY, "X-Api-Key: also", "API-KEY: too", "x-other: stays")
    async with Pod(answering(plain())) as pod, guarded(pod) as rig:
        assert (await rig.ask(post(CHAT, b'{"model":"m"' + b" " * size + b"}", *headers))).status == 200
        (received,) = pod.requests
        names = {name.lower() for name, _ in received.headers}
        assert not names & {b"authorization", b"x-api-key", b"api-key"}
        assert b"x-other" in names
        assert rig.gateway.calls[0].identity == TEAM


async def test_a_pod_with_its_own_key_gets_that_one() -> None:
    async with Pod(answering(plain())) as pod, guarded(pod) as rig:
        update(pod.endpoint, api_key="of the pod")
        await rig.ask(post(CHAT, b"{}", KEY))
        assert pod.requests[0].all(b"authorization") == [b"Bearer of the pod"]


@pytest.mark.parametrize("size", [2, 300_000])
async def test_a_slow_authentication_delays_its_request(size: int) -> None:
    async with Pod(answering(plain())) as pod, guarded(pod) as rig, rig.client() as client:
        client.send(post(CHAT, b"{" + b" " * size + b"}", "authorization: Bearer later", close=False))
        await asyncio.sleep(0.05)
        assert rig.gateway.calls == []
        rig.authenticator.turn.set()
        assert (await client.response()).startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_leaves_during_authentication_leaves_nothing() -> None:
    async with guarded() as rig:
        async with rig.client() as client:
            client.send(post(CHAT, b"{}", "authorization: Bearer later", close=False))
            await asyncio.sleep(0.05)
            client.leave()
        await until(lambda: len(rig.ended) == 1)
        assert rig.ended[0].status == 499


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_probes_need_no_key(path: str) -> None:
    async with guarded() as rig:
        seen = await rig.ask(f"GET {path} HTTP/1.1\r\nhost: kvlane\r\nconnection: close\r\n\r\n".encode())
        assert seen.status == 200


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/nothing", "/v1/models/llama-8b", "//health", "/health/"])
async def test_every_other_path_needs_a_key(path: str) -> None:
    async with guarded() as rig:
        seen = await rig.ask(f"GET {path} HTTP/1.1\r\nhost: kvlane\r\nconnection: close\r\n\r\n".encode())
        assert seen.status == 401


async def test_a_key_sees_its_models() -> None:
    async with guarded() as rig:
        ask = "GET /v1/models{} HTTP/1.1\r\nhost: kvlane\r\nconnection: close\r\nx-api-key: right\r\n\r\n"
        assert (await rig.ask(ask.format("").encode())).json()["data"] == [{"id": "llama-8b"}]
        assert (await rig.ask(ask.format("/llama-8b").encode())).status == 200
        assert (await rig.ask(ask.format("/qwen").encode())).status == 404
