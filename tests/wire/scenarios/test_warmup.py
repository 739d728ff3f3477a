"""New and restarted pods have the most frequent prompts before any client sends one."""

from __future__ import annotations

from typing import Any

from proxy.fleet.warmup import SAMPLE, SHARED_BY
from proxy.lab.sim import SimConfig, SimFleet
from proxy.settings import from_mapping
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

SYSTEM = {"role": "system", "content": "You are the help desk of a bank, and respond in one sentence. " * 60}
WARM = {"pods": {"warmup": {"prompts": 3}}}

ENOUGH = SHARED_BY * SAMPLE
"""Different requests after which their system prompt is kept."""


async def ask(s: Stack, question: str, path: str = CHAT) -> tuple[str, int]:
    """The pod that responded, and the prompt tokens that it had cached."""
    body: dict[str, Any] = {
        "model": "sim",
        "messages": [SYSTEM, {"role": "user", "content": question}],
        "max_tokens": 1,
    }
    response, payload = await s.post(path, body)
    assert response.status == 200
    return response.headers["x-kvlane-endpoint"], payload["usage"]["prompt_tokens_details"]["cached_tokens"]


async def warmed_up(s: Stack) -> None:
    """The pod called late was sent what there is, and has it."""
    await until(lambda: (pod := s.app.fleet.get("late")) is not None and s.app._indexes()[0].blocks(pod) > 10)
    await s.idle()


async def test_the_first_request_to_a_new_pod_has_the_system_prompt_cached() -> None:
    async with SimFleet(1, SimConfig(time_scale=20)) as late, stack(1, settings=WARM) as s:
        for number in range(ENOUGH):
            await ask(s, f"question {number}")
        await s.operate("POST", "/admin/pods", {"url": late.urls[0], "name": "late"})
        await warmed_up(s)
        await s.operate("POST", "/admin/pods/pod-0/drain")
        name, cached = await ask(s, "the first question")
        assert name == "late"
        assert cached > 700
        assert all(endpoint.load.requests == endpoint.load.tokens == 0 for endpoint in s.app.fleet.endpoints)


async def test_without_warm_up_the_first_request_to_a_new_pod_has_nothing_cached() -> None:
    async with SimFleet(1, SimConfig(time_scale=20)) as late, stack(1) as s:
        for number in range(ENOUGH):
            await ask(s, f"question {number}")
        await s.operate("POST", "/admin/pods", {"url": late.urls[0], "name": "late"})
        await until(lambda: len(s.app.fleet.ready) == 2)
        await s.operate("POST", "/admin/pods/pod-0/drain")
        assert await ask(s, "the first question") == ("late", 0)


async def test_a_pool_warms_up_its_pods_with_its_own_prompts_and_a_reload_can_enable_it() -> None:
    async with SimFleet(2, SimConfig(time_scale=20)) as late, stack(1) as s:
        for number in range(ENOUGH):
            await ask(s, f"question {number}")
        own = {"static": [{"url": late.urls[0], "name": "first"}]}
        given = s.app._settings.source
        await s.app.reload(from_mapping({**given, "pools": {"other": {"pods": {**own, **WARM["pods"]}}}}))
        await until(lambda: s.app.fleet.get("first") in s.app.fleet.ready)
        await s.operate("POST", "/admin/pods/pod-0/drain")
        for number in range(ENOUGH):
            assert (await ask(s, f"question {number}"))[0] == "first"
        await s.operate("POST", "/admin/pods", {"url": late.urls[1], "name": "late", "pool": "other"})
        index = s.app._indexes()[1]
        await until(lambda: (pod := s.app.fleet.get("late")) is not None and index.blocks(pod) > 10)
        await s.app.reload(from_mapping({**given, "pools": {"other": {"pods": own}}}))
        assert not s.app.serving.warmups
        await s.idle()


async def test_warm_up_is_not_charged_to_clients_or_counted_as_requests() -> None:
    async with SimFleet(1, SimConfig(time_scale=20)) as late, stack(1, settings=WARM) as s:
        for number in range(ENOUGH):
            await ask(s, f"question {number}")
        await s.operate("POST", "/admin/pods", {"url": late.urls[0], "name": "late"})
        await warmed_up(s)
        s.app.observer.flush()
        found = await samples(s)
        assert sum(found[series] for series in found if series.startswith("kvlane_requests_total{")) == ENOUGH
        assert found['kvlane_attempts_total{ending="complete",endpoint="late"}'] == 1


async def samples(s: Stack) -> dict[str, float]:
    async with s.http.get(s.admin + "/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}
