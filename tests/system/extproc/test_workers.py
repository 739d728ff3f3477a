"""The port for gateways where several workers serve, and while they change."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import orjson
import pytest

from proxy.app import App
from proxy.cluster.supervisor import Supervisor
from proxy.lab.sim import SimConfig, SimFleet
from tests.helpers.cluster.host import CHAT, configured, question
from tests.helpers.extproc.gateway import binary, envoy
from tests.helpers.waiting import PATIENCE, until
from tests.wire.extproc.test_protocol import Talk, set_by, talk

OWN = [("grpc.use_local_subchannel_pool", 1)]
"""A connection for each channel."""


@dataclass
class Host:
    sim: SimFleet
    supervisor: Supervisor

    def channel(self) -> Any:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.supervisor.picker_port}", options=OWN)

    async def reload(self, **sections: Any) -> None:
        await self.supervisor.reload(configured(self.sim, **sections))


def gateways(**given: Any) -> Mapping[str, Any]:
    return {"host": "127.0.0.1", "port": 0, **given}


@asynccontextmanager
async def host(**sections: Any) -> AsyncIterator[Host]:
    async with (
        SimFleet(2, SimConfig(time_scale=1)) as sim,
        Supervisor(configured(sim, extproc=gateways(), **sections), 2) as supervisor,
    ):
        yield Host(sim, supervisor)


async def asks(one: Talk, model: str = "sim") -> Mapping[str, str]:
    """What the gateway is deliver to set."""
    await one.head()
    await one.say(request_body={"body": orjson.dumps({**question("Hi"), "model": model}), "end_of_stream": True})
    reply = await one.hear()
    return set_by(reply.request_headers.response.header_mutation)


async def worker_of(it: Host) -> str:
    """Of one that got a new connection: ids of requests begin with what is its own."""
    async with it.channel() as channel:
        one = talk(channel)
        deliver = await asks(one)
        await one.end()
        return deliver["x-request-id"][:16]


async def test_all_workers_serve_one_port() -> None:
    async with host() as it:
        assert it.supervisor.picker_port
        found: set[str] = set()
        async with asyncio.timeout(PATIENCE):
            while len(found) < 2:
                found.add(await worker_of(it))


async def test_a_reload_applies_to_this_port() -> None:
    async with host() as it, it.channel() as channel:
        one = talk(channel)
        await one.head()
        await one.say(request_body={"body": orjson.dumps({**question("Hi"), "model": "nice"}), "end_of_stream": True})
        assert (await one.hear()).immediate_response.status.code == 404
        await it.reload(models={"aliases": {"nice": "sim"}}, extproc=gateways(fallbacks=1))
        found = {await worker_of(it) for _ in range(10)}
        again = talk(channel)
        await asks(again, "nice")
        assert (await again.hear()).request_body.response.body_mutation.streamed_response.body.count(b'"sim"') == 1
        await again.end()
        assert len(found) <= 2, "the same workers"


async def test_replaced_workers_finish_their_requests_while_others_serve() -> None:
    async with host() as it, it.channel() as channel:
        before = {await worker_of(it) for _ in range(10)}
        running = talk(channel)
        assert "x-request-id" in await asks(running)
        await it.reload(listen={"host": "127.0.0.1", "port": 0, "maxBody": "1MiB"}, extproc=gateways())
        async with asyncio.timeout(PATIENCE):
            while before & {await worker_of(it) for _ in range(10)}:
                pass  # a worker accepts connections until it has received SIGTERM
        assert (await running.hear()).WhichOneof("kind") == "request_body"
        await running.say(response_headers={"headers": {"headers": [{"key": ":status", "raw_value": b"200"}]}})
        assert (await running.hear()).WhichOneof("kind") == "response_headers"
        await running.end()


async def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        taken = gateways(port=other.getsockname()[1])
        async with SimFleet(1) as sim:
            for serves in (Supervisor(configured(sim, extproc=taken), 2), App(configured(sim, extproc=taken))):
                with pytest.raises(OSError):
                    await serves.__aenter__()


async def test_behind_envoy_no_request_fails_while_workers_are_replaced(tmp_path: Path) -> None:
    binary()
    async with host() as it, aiohttp.ClientSession() as http:
        assert it.supervisor.picker_port
        async with envoy(it.supervisor.picker_port, tmp_path, lambda config: None) as url:
            statuses: list[int] = []
            stop = False

            async def client() -> None:
                while not stop:
                    async with http.post(url + CHAT, json=question("Hi", 2)) as response:
                        await response.read()
                        statuses.append(response.status)

            clients = [asyncio.ensure_future(client()) for _ in range(4)]
            await until(lambda: len(statuses) > 20)
            await it.reload(listen={"host": "127.0.0.1", "port": 0, "maxBody": "1MiB"}, extproc=gateways())
            begun = len(statuses)
            await until(lambda: len(statuses) > begun + 20)
            stop = True
            await asyncio.gather(*clients)
            assert set(statuses) == {200}
