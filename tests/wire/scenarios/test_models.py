"""/v1/models over pods that serve different things, and requests that go where their model is."""

from __future__ import annotations

import asyncio

from proxy.lab.sim import SimConfig
from tests.helpers.scenarios.stack import Stack, stack

BASE = SimConfig(model="base", time_scale=20)
TUNED = SimConfig(model="base", lora_adapters=("poems", "laws"), time_scale=20)
OTHER = SimConfig(model="org/other", max_model_len=4096, time_scale=20)


async def test_models_of_all_pods_are_merged_with_their_extra_fields() -> None:
    async with stack(3, [BASE, TUNED, OTHER]) as s, s.http.get(s.url + "/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
        assert set(cards) == {"base", "poems", "laws", "org/other"}
        assert cards["poems"]["parent"] == "base"
        assert cards["org/other"]["max_model_len"] == 4096
        assert cards["base"]["owned_by"] == "vllm"


async def test_one_model_is_found_by_its_name_even_with_a_slash() -> None:
    async with stack(2, [BASE, OTHER]) as s:
        for name, status in (("base", 200), ("org/other", 200), ("org%2Fother", 200), ("none", 404)):
            async with s.http.get(f"{s.url}/v1/models/{name}") as response:
                assert response.status == status, name


async def test_requests_for_a_model_go_to_its_pods_only() -> None:
    async with stack(3, [BASE, TUNED, OTHER]) as s:
        assert await pods_of(s, "poems") == {"pod-1"}
        assert await pods_of(s, "org/other") == {"pod-2"}
        assert await pods_of(s, "base") == {"pod-0", "pod-1"}


async def pods_of(s: Stack, model: str) -> set[str]:
    responses = await asyncio.gather(*(s.chat(f"question {number}", model=model) for number in range(12)))
    assert all(response.status == 200 for response, _ in responses)
    return {response.headers["x-kvlane-endpoint"] for response, _ in responses}


async def test_a_model_whose_pods_are_unreachable_is_unavailable_and_not_unknown() -> None:
    async with stack(2, [BASE, OTHER]) as s:
        await s.pods[1].kill()
        statuses = [(await s.chat(model="org/other"))[0].status for _ in range(2)]
        assert set(statuses) <= {502, 503}
        assert (await s.chat(model="none"))[0].status == 404
        assert (await s.chat(model="base"))[0].status == 200


async def test_configured_models_are_the_only_ones_of_their_pod() -> None:
    async with stack(2, [TUNED, TUNED], each=[{"models": ["base", "poems"]}, {"models": ["base", "laws"]}]) as s:
        assert await pods_of(s, "poems") == {"pod-0"}
        assert await pods_of(s, "laws") == {"pod-1"}
