from __future__ import annotations

import aiohttp

from proxy.lab.sim import SimPod
from tests.helpers.waiting import until


async def test_every_event_is_echoed(pod: SimPod, client: aiohttp.ClientSession) -> None:
    async with client.ws_connect("/v1/realtime?model=sim") as socket:
        assert (await socket.receive_json())["type"] == "session.created"
        await socket.send_json({"type": "hello"})
        assert await socket.receive_json() == {"type": "echo", "event": {"type": "hello"}}
        await socket.send_bytes(b"sound")
        assert await socket.receive_bytes() == b"sound"
        await socket.send_str("no json")
        assert (await socket.receive_json())["type"] == "error"
    await until(lambda: not pod.requests.open)
    assert not pod.requests[0].aborted


async def test_without_an_upgrade_it_is_a_bad_request(pod: SimPod, client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/realtime") as response:
        assert response.status == 400
    assert pod.requests[0].status == 400
