"""Images that one pod encodes, in prompts that a second one computes and a third one decodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import pytest

from proxy.lab.sim import Fault, FaultKind
from proxy.lab.sim.config import Role
from tests.helpers.scenarios.disagg import SIM, ask, disaggregated, settled, transfers
from tests.helpers.scenarios.stack import Stack

EC: tuple[Literal["example", "nixl"], ...] = ("example", "nixl")
EPD: tuple[Role, ...] = ("encode", "encode", "prefill", "decode")

SCHEDULING: Mapping[str, Any] = {
    "plugins": [
        {
            "type": "disagg-profile-handler",
            "parameters": {
                "deciders": {"prefill": "always-disagg-pd-decider", "encode": "always-disagg-multimodal-decider"}
            },
        },
        {"type": "always-disagg-pd-decider"},
        {"type": "always-disagg-multimodal-decider"},
        {"type": "encode-filter"},
        {"type": "prefill-filter"},
        {"type": "decode-filter"},
    ],
    "schedulingProfiles": [
        {"name": stage, "plugins": [{"pluginRef": f"{stage}-filter"}]} for stage in ("encode", "prefill", "decode")
    ],
}


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * (4 + 4 * number)}"}}


def shown(*numbers: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "And?"}, *map(image, numbers)]}]}


@asynccontextmanager
async def encoding(
    ec_connector: Literal["example", "nixl"] = "example", roles: Sequence[Role] = EPD
) -> AsyncIterator[Stack]:
    sim = replace(SIM, ec_connector=ec_connector)
    async with disaggregated(roles=roles, sim=sim, scheduling=SCHEDULING) as proxy:
        yield proxy


def encoded(proxy: Stack) -> list[int]:
    """Images, by pod."""
    return [len(pod.engine.encoded) for pod in proxy.pods]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ec_connector", EC)
async def test_an_image_is_encoded_by_an_encode_pod_only(
    ec_connector: Literal["example", "nixl"], stream: bool
) -> None:
    async with encoding(ec_connector) as proxy:
        received = await ask(proxy, stream=stream, **shown(1))
        assert (received.status, received.is_whole) == (200, True)
        assert sorted(encoded(proxy)[:2]) == [0, 1]
        assert encoded(proxy)[2:] == [0, 0]
        assert transfers(proxy) == 1
        await settled(proxy)


async def test_the_images_of_a_prompt_are_distributed() -> None:
    async with encoding("nixl") as proxy:
        assert (await ask(proxy, stream=True, **shown(1, 2, 2, 3))).is_whole
        assert sorted(encoded(proxy)[:2]) == [1, 2]
        assert encoded(proxy)[2:] == [0, 0]
        await settled(proxy)


async def test_all_pods_get_the_clients_request_id() -> None:
    async with encoding() as proxy:
        await ask(proxy, stream=True, request_id="mine", **shown(1))
        records = [record for pod in proxy.pods for record in pod.requests]
        assert len(records) == 3
        assert all("mine" in record.id for record in records)


async def test_text_alone_reaches_no_encode_pod() -> None:
    async with encoding() as proxy:
        assert (await ask(proxy, stream=True)).is_whole
        assert not any(len(pod.requests) for pod in proxy.pods[:2])


async def test_images_are_encoded_for_pods_that_prefill_and_decode() -> None:
    async with encoding("nixl", roles=("encode", "decode")) as proxy:
        assert (await ask(proxy, stream=True, **shown(1))).is_whole
        assert encoded(proxy) == [1, 0]
        await settled(proxy)


@pytest.mark.parametrize(
    "kind",
    [FaultKind.REJECT, FaultKind.RESET, FaultKind.CRASH, FaultKind.GARBAGE, FaultKind.LOADING, FaultKind.ENGINE_DEAD],
)
async def test_an_encode_pod_that_fails_is_replaced(kind: FaultKind) -> None:
    async with encoding("nixl") as proxy:
        proxy.pods[0].faults.set([Fault(kind, count=1, seconds=0.5)])
        for number in range(3):
            received = await ask(proxy, stream=True, request_id=f"r{number}", **shown(number))
            assert (received.status, received.is_whole) == (200, True)
        assert encoded(proxy)[2:] == [0, 0]
        await settled(proxy)


@pytest.mark.parametrize("ec_connector", EC)
async def test_a_lost_embedding_is_encoded_by_the_prefill_pod(
    ec_connector: Literal["example", "nixl"],
) -> None:
    async with encoding(ec_connector) as proxy:
        for pod in proxy.pods[:2]:
            pod.faults.set([Fault(FaultKind.LOST_TRANSFER)])
        assert (await ask(proxy, stream=True, **shown(1))).is_whole
        assert encoded(proxy)[2:] == [1, 0]
        await settled(proxy)


async def test_without_encode_pods_the_prefill_pods_encode() -> None:
    async with encoding() as proxy:
        for pod in proxy.pods[:2]:
            await pod.kill()
        for number in range(2):
            assert (await ask(proxy, stream=True, request_id=f"r{number}", **shown(number))).is_whole
        assert encoded(proxy) == [0, 0, 2, 0]
        await settled(proxy)
