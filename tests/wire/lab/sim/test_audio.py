from __future__ import annotations

import aiohttp
import pytest

from proxy.lab.sim import SimPod


def form(**fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value)
    data.add_field("file", b"\r\n\r\n--\xff" * 100, filename="a.wav", content_type="audio/wav")
    return data


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_the_bytes_of_audio_are_counted(pod: SimPod, client: aiohttp.ClientSession, path: str) -> None:
    async with client.post(path, data=form(model="sim")) as response:
        assert (await response.json())["text"] == "700 bytes of audio"
    assert pod.requests[0].model == "sim"


async def test_the_response_may_be_plain_text(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/audio/transcriptions", data=form(response_format="text")) as response:
        assert await response.text() == "700 bytes of audio"


async def test_an_unknown_model_transcribes_nothing(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/audio/transcriptions", data=form(model="nope")) as response:
        assert response.status == 404


async def test_speech_is_bytes(client: aiohttp.ClientSession) -> None:
    async with client.post("/v1/audio/speech", json={"input": "the sea", "voice": "none"}) as response:
        assert response.content_type == "audio/wav"
        assert len(await response.read()) > 1_000
