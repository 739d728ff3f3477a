from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from proxy.lab.sim import Fault, FaultKind, SimConfig, SimFleet, SimPod

CHAT = "/v1/chat/completions"
SECONDS = 0.3
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SHOWN = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, IMAGE]}]}


def fleet(**more: Any) -> SimFleet:
    return SimFleet(2, [SimConfig(role=role, encode_seconds=SECONDS, **more) for role in ("encode", "both")])


async def ask(pod: SimPod, **body: Any) -> tuple[int, float]:
    """The status, and how long it took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    status, _ = await replied(pod, **body)
    return status, loop.time() - started


async def replied(pod: SimPod, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(pod.url) as http, http.post(CHAT, json={"max_tokens": 1, **body}) as response:
        return response.status, await response.json()


async def test_an_image_is_encoded_once() -> None:
    async with SimPod(SimConfig(encode_seconds=SECONDS)) as pod:
        assert (await ask(pod, **SHOWN))[1] >= SECONDS
        pod.engine.forget_prefixes()
        assert (await ask(pod, **SHOWN))[1] < SECONDS


async def test_media_encoded_by_an_encode_pod_are_not_encoded_again() -> None:
    async with fleet() as pods:
        encode, other = pods.pods
        assert (await ask(encode, messages=[{"role": "user", "content": [IMAGE]}]))[1] >= SECONDS
        status, seconds = await ask(other, **SHOWN)
        assert status == 200
        assert seconds < SECONDS


async def test_lost_embeddings_are_encoded_again() -> None:
    async with fleet() as pods:
        encode, other = pods.pods
        encode.faults.set([Fault(FaultKind.LOST_TRANSFER)])
        await ask(encode, **SHOWN)
        assert (await ask(other, **SHOWN))[1] >= SECONDS


async def test_an_encode_pod_serves_nothing_without_media() -> None:
    async with fleet() as pods:
        assert (await ask(pods.pods[0], messages=[{"role": "user", "content": "Hello!"}]))[0] == 400


async def test_an_encode_pod_reports_where_its_embeddings_are() -> None:
    async with fleet(ec_connector="nixl") as pods:
        encode, other = pods.pods
        _, reply = await replied(encode, **SHOWN)
        params = reply["ec_transfer_params"]
        [where] = params.values()
        assert (where["remote_host"], where["remote_port"]) == ("127.0.0.1", encode.port)
        assert (await ask(other, **SHOWN, ec_transfer_params=params))[1] < SECONDS
        assert (await ask(other, **SHOWN))[1] >= SECONDS


async def test_embeddings_are_lost_with_the_pod_that_has_them() -> None:
    async with fleet(ec_connector="nixl") as pods:
        encode, other = pods.pods
        _, reply = await replied(encode, **SHOWN)
        await encode.kill()
        assert (await ask(other, **SHOWN, ec_transfer_params=reply["ec_transfer_params"]))[1] >= SECONDS
