"""What real clients send gets to the pod: nothing is lost, and nothing altered but what belongs to the connection."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from collections.abc import Set as AbstractSet

import pytest

from tests.clients.recording import Sent, clients, name_of, sent_by
from tests.helpers.http.support import Pod, Received, plain
from tests.helpers.scenarios.stack import running

RESPONSE = b'{"from":"the pod"}'
OF_THE_CONNECTION = {"host", "connection", "content-length"}
"""Each side of the proxy has its own."""

OWN = {"/metrics": 404, "/v1/models": 200}
"""Requests of load generators that kvlane serves itself. Metrics are on the admin port."""

SENT = [(sent, f"{name}-{at}") for name in clients() for at, sent in enumerate(sent_by(name))]
RELAYED = [pytest.param(sent, id=id) for sent, id in SENT if sent.path not in OWN]
OWN_REQUESTS = [pytest.param(sent, id=id) for sent, id in SENT if sent.path in OWN]


class Keeping:
    """A pod that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[Received, bytes]] = []

    async def script(self, request: Received) -> None:
        body = await request.body()
        if request.line.startswith(b"GET /health"):
            await request.send(plain(b""))
        elif request.line.startswith(b"GET"):
            await request.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            self.got.append((request, body))
            await request.send(plain(RESPONSE))


@pytest.fixture
async def kept() -> AsyncIterator[tuple[Keeping, int]]:
    keeping = Keeping()
    async with Pod(keeping.script) as pod, running([pod.endpoint.url]) as app:
        yield keeping, app.port


@pytest.mark.parametrize("sent", RELAYED)
async def test_a_pod_gets_the_clients_request(sent: Sent, kept: tuple[Keeping, int]) -> None:
    keeping, port = kept
    response = await response_to(sent, port)
    ((got, body),) = keeping.got
    assert got.line.decode() == sent.line
    assert body == sent.body
    arrived = [b": ".join(header).decode("latin-1") for header in got.headers]
    added = {"x-request-id"} - {name_of(line) for line in sent.headers}
    assert passed_on(arrived, added) == passed_on(sent.headers)
    assert response.startswith(b"HTTP/1.1 200 ")
    assert response.endswith(RESPONSE)


@pytest.mark.parametrize("sent", OWN_REQUESTS)
async def test_local_paths_are_served(sent: Sent, kept: tuple[Keeping, int]) -> None:
    keeping, port = kept
    assert (await response_to(sent, port)).startswith(b"HTTP/1.1 %d " % OWN[sent.path])
    assert not keeping.got


def passed_on(lines: Sequence[str], added: AbstractSet[str] = frozenset()) -> list[tuple[str, str]]:
    """Names and values. The case of a name does not count, and the order of lines only if they have one name."""
    passed = [line for line in lines if name_of(line) not in OF_THE_CONNECTION | added]
    return sorted(((name_of(line), line.partition(": ")[2]) for line in passed), key=lambda pair: pair[0])


def test_requests_of_every_client_are_recorded() -> None:
    assert {"aiperf", "langchain", "llama-index", "openai-node", "openai-python"} <= set(clients())
    assert all(sent_by(name) for name in clients())


async def response_to(sent: Sent, port: int) -> bytes:
    """Head and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent.raw())
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
            return head + await reader.readexactly(int(length))
    finally:
        writer.close()
        await writer.wait_closed()
