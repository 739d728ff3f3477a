"""Forms that are passed on while they arrive, and sockets that stay open both ways."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import aiohttp
import pytest

from proxy.lab.sim import SimConfig
from tests.helpers.scenarios.stack import Stack, stack
from tests.helpers.waiting import until

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SOUND = bytes(range(256)) * 16 * 1024
"""4 MiB."""


def form(model: str | None, *, file_first: bool = False, sound: bytes = SOUND) -> aiohttp.FormData:
    parts = aiohttp.FormData()
    if model is not None and not file_first:
        parts.add_field("model", model)
    parts.add_field("file", io.BytesIO(sound), filename="sea.wav", content_type="audio/wav")
    if model is not None and file_first:
        parts.add_field("model", model)
    return parts


async def upload(s: Stack, parts: aiohttp.FormData) -> tuple[aiohttp.ClientResponse, object]:
    async with s.http.post(s.url + TRANSCRIPTIONS, data=parts) as response:
        return response, await response.json()


@pytest.mark.parametrize("file_first", [False, True])
async def test_a_form_of_several_megabytes_arrives_complete(file_first: bool) -> None:
    async with stack(2) as s:
        response, body = await upload(s, form("sim", file_first=file_first))
        assert response.status == 200
        assert body == {"text": f"{len(SOUND)} bytes of audio", "usage": {"type": "duration", "seconds": 1}}
        await s.idle()


async def test_a_small_form_and_one_without_a_model_are_served() -> None:
    async with stack(1) as s:
        for parts in (form("sim", sound=b"short"), form("sim", file_first=True, sound=b"short"), form(None)):
            response, _ = await upload(s, parts)
            assert response.status == 200


async def test_a_form_goes_to_the_pods_of_its_model() -> None:
    async with stack(3, [SimConfig(model="one"), SimConfig(model="two"), SimConfig(model="one")]) as s:
        for _ in range(4):
            response, _ = await upload(s, form("two"))
            assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, "pod-1")
        response, _ = await upload(s, form("two", file_first=True))
        assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, "pod-1")
        response, _ = await upload(s, form("none"))
        assert response.status == 404


async def test_a_form_that_is_too_large_is_refused_and_not_relayed_completely() -> None:
    async with stack(1, settings={"listen": {"maxBody": "1MiB"}}) as s:
        response, _ = await upload(s, form("sim"))
        assert response.status == 413
        assert (await upload(s, form("sim", sound=b"short")))[0].status == 200
        await s.idle()


async def test_a_form_without_a_length_is_relayed_while_it_arrives() -> None:
    arriving = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'--kvlane\r\ncontent-disposition: form-data; name="model"\r\n\r\nsim\r\n'
        yield b'--kvlane\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + SOUND
        await arriving.wait()
        yield b"more\r\n--kvlane--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=kvlane"}
    async with stack(1, settings={"listen": {"keptUpload": "64KiB"}}) as s:
        task = asyncio.get_running_loop().create_task(upload_pieces(s, pieces(), headers))
        await until(lambda: bool(s.pods[0].requests.open))
        arriving.set()
        assert await task == f"{len(SOUND) + 4} bytes of audio"


async def upload_pieces(s: Stack, pieces: AsyncIterator[bytes], headers: dict[str, str]) -> str:
    async with s.http.post(s.url + TRANSCRIPTIONS, data=pieces, headers=headers) as response:
        text: str = (await response.json())["text"]
        return text


async def test_speech_is_returned_as_bytes() -> None:
    body = {"model": "sim", "input": "the sea", "voice": "none"}
    async with stack(1) as s, s.http.post(s.url + "/v1/audio/speech", json=body) as response:
        assert response.content_type == "audio/wav"
        assert await response.read() == b"RIFF" + b"the sea" * 160


async def test_a_websocket_works_in_both_directions() -> None:
    async with stack(2) as s:
        async with s.http.ws_connect(s.url + "/v1/realtime?model=sim") as socket:
            assert (await socket.receive_json())["type"] == "session.created"
            assert s.app.ledger.in_flight == 1
            for number in range(20):
                await socket.send_json({"type": "input", "number": number})
                assert (await socket.receive_json())["event"]["number"] == number
            await socket.send_bytes(SOUND[:100_000])
            assert (await socket.receive()).data == SOUND[:100_000]
        await s.idle()


async def test_a_websocket_goes_to_the_pods_of_its_model() -> None:
    async with stack(2, [SimConfig(model="one"), SimConfig(model="two")]) as s:
        for model in ("two", "one", "two"):
            async with s.http.ws_connect(f"{s.url}/v1/realtime?model={model}") as socket:
                assert (await socket.receive_json())["model"] == model
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await s.http.ws_connect(s.url + "/v1/realtime?model=none")
        assert caught.value.status == 404


async def test_a_websocket_ends_with_its_pod() -> None:
    async with stack(1) as s, s.http.ws_connect(s.url + "/v1/realtime?model=sim") as socket:
        await socket.receive_json()
        await s.pods[0].kill()
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)
        await s.idle()


async def test_a_websocket_whose_client_vanishes_leaves_the_pod() -> None:
    async with stack(1) as s:
        async with aiohttp.ClientSession() as client:
            socket = await client.ws_connect(s.url + "/v1/realtime?model=sim")
            await socket.receive_json()
            response = socket._response
            assert response.connection is not None
            assert response.connection.transport is not None
            response.connection.transport.abort()
            await until(lambda: not s.pods[0].requests.open)
        await s.idle()
