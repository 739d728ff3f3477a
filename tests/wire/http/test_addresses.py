"""Whatever a client sends, the address that is connected to is that of a pod."""

from __future__ import annotations

import pytest

from proxy.http.settings import SecuritySettings
from tests.helpers.http.support import CHAT, Pod, answering, plain, rig

TARGETS = (
    "http://{trap}{path}",
    "http://user:password@{trap}{path}",
    "HTTP://{trap}{path}",
    "//{trap}{path}",
    "{path}@{trap}",
    "@{trap}{path}",
    "{path}/../..//{trap}/",
    "{path}?url=http://{trap}/",
    "{path}#@{trap}/",
    "\\\\{trap}{path}",
    "/x/%2e%2e//{trap}{path}",
    "ftp://{trap}{path}",
)

FIELDS = (
    "host: {trap}",
    "x-forwarded-host: {trap}",
    "x-forwarded-for: {trap}",
    "x-forwarded-server: {trap}",
    "forwarded: host={trap}",
    "x-host: {trap}",
    "x-original-url: http://{trap}/",
    "x-rewrite-url: http://{trap}/",
    "x-gateway-destination-endpoint: {trap}",
    "x-gateway-destination-endpoint-subset: {trap}",
    "x-prefiller-host-port: {trap}",
    "x-data-parallel-host-port: {trap}",
    "x-kvlane-endpoint: {trap}",
    "x-kvlane-anything: {trap}",
    "proxy-connection: {trap}",
    "connection: host",
    "location: http://{trap}/",
)


@pytest.mark.parametrize("target", TARGETS)
async def test_a_request_target_chooses_no_address(target: str) -> None:
    open_paths = SecuritySettings(relay_paths=("/x/*",))
    async with Pod(answering(plain())) as trap, Pod(answering(plain())) as pod, rig(pod, security=open_paths) as port:
        where = trap.endpoint.url.removeprefix("http://")
        line = target.format(trap=where, path=CHAT)
        await port.ask(
            f"POST {line} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode()
        )
        assert (await port.until_ended()).status in (200, 400, 404)
        assert trap.connections == 0
        for request in pod.requests:
            assert request.line.startswith(b"POST /")
            assert not request.line.startswith(b"POST //")


@pytest.mark.parametrize("field", FIELDS)
async def test_a_header_chooses_no_address(field: str) -> None:
    async with Pod(answering(plain())) as trap, Pod(answering(plain())) as pod, rig(pod) as port:
        line = field.format(trap=trap.endpoint.url.removeprefix("http://"))
        host = "" if line.startswith("host:") else "host: a\r\n"
        request = f"POST {CHAT} HTTP/1.1\r\n{host}{line}\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}"
        assert (await port.ask(request.encode())).status == 200
        assert trap.connections == 0
        assert pod.requests[0].all(b"host") == [pod.endpoint.url.removeprefix("http://").encode()]


async def test_a_redirect_of_a_pod_is_passed_on_and_not_followed() -> None:
    async with Pod(answering(plain())) as trap:
        moved = f"HTTP/1.1 307 Moved\r\nlocation: {trap.endpoint.url}/\r\ncontent-length: 0\r\n\r\n".encode()
        async with Pod(answering(moved)) as pod, rig(pod) as port:
            request = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}"
            assert (await port.ask(request.encode())).status == 307
        assert trap.connections == 0
