"""The metrics of a whole proxy at /metrics after it has been used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.lab.sim import SimConfig, StepTiming
from tests.helpers.scenarios.stack import BLIND, CHAT, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.02, per_prefill_token=0.0))
WARM = "words that are the same every time " * 200


async def samples(s: Stack) -> dict[str, float]:
    async with s.http.get(s.admin + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def total(found: dict[str, float], name: str, *labels: str) -> float:
    """The sum over all series of this name that carry the labels."""
    matching = [key for key in found if key.partition("{")[0] == name and all(label in key for label in labels)]
    return sum(found[key] for key in matching)


async def test_requests_are_counted_by_ending() -> None:
    async with stack(1, SLOW) as s:
        await s.chat(max_tokens=2)
        await s.chat(model="none")
        await s.chat(temperature=-1)
        async with s.http.get(s.url + "/nope"):
            pass
        body = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2000, "stream": True}
        async with s.http.post(s.url + CHAT, json=body) as response:
            await response.content.readuntil(b"\n\n")
            assert (await samples(s))['kvlane_endpoint_in_flight_requests{endpoint="pod-0"}'] == 1
            response.close()
        await s.idle()
        found = await samples(s)
        assert total(found, "kvlane_requests_total", 'outcome="complete"', 'status="2xx"') == 1
        assert total(found, "kvlane_requests_total", 'outcome="complete"', 'status="4xx"') == 1
        assert total(found, "kvlane_requests_total", 'outcome="client-gone"') == 1
        assert found['kvlane_refused_total{reason="unknown-model"}'] == 1
        assert found['kvlane_refused_total{reason="unknown-path"}'] == 1
        assert found['kvlane_endpoint_in_flight_requests{endpoint="pod-0"}'] == 0


async def test_malformed_requests_are_counted_as_refused() -> None:
    async with stack(1) as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", s.app.port)
        writer.write(b"NONSENSE\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        found = await samples(s)
        assert total(found, "kvlane_requests_total", 'outcome="refused"', 'path="other"', 'status="4xx"') == 1
        assert found['kvlane_refused_total{reason="invalid-request"}'] == 1
        assert found['kvlane_client_connections_refused_total{reason="bad-request"}'] == 1
        assert found['kvlane_client_connections_refused_total{reason="tls-handshake"}'] == 0


async def test_tokens_and_hits_equal_those_of_the_pods() -> None:
    async with stack(2) as s:
        usages = [(await s.chat(WARM, max_tokens=3))[1]["usage"] for _ in range(3)]
        found = await samples(s)
        prompt = sum(usage["prompt_tokens"] for usage in usages)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert total(found, "kvlane_prompt_tokens_total") == prompt
        assert total(found, "kvlane_completion_tokens_total") == 9
        assert (
            total(found, "kvlane_cached_tokens_total") == found["kvlane_prefix_actual_hit_tokens_total"] == cached > 0
        )
        predicted = found["kvlane_prefix_predicted_hit_tokens_total"]
        assert abs(predicted - cached) < 0.1 * prompt


async def test_times_are_measured_once_per_request() -> None:
    async with stack(2) as s:
        await asyncio.gather(*(s.chat(f"question {number}", max_tokens=3) for number in range(4)))
        body = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "stream": True}
        async with s.http.post(s.url + CHAT, json=body) as response:
            await response.read()
        found = await samples(s)
        assert total(found, "kvlane_time_to_first_token_seconds_count") == 5
        assert total(found, "kvlane_time_to_first_token_seconds_count", 'stream="true"') == 1
        assert total(found, "kvlane_time_per_output_token_seconds_count") == 1
        assert total(found, "kvlane_request_duration_seconds_count") == 5
        assert total(found, "kvlane_scheduling_duration_seconds_count") == 5
        assert total(found, "kvlane_scheduling_decisions_total") == 5
        assert total(found, "kvlane_plugin_duration_seconds_count", 'extension_point="Scorer"') > 0


async def test_invented_names_add_no_series() -> None:
    async with stack(1) as s:
        await s.chat()
        await s.chat(model="warm up")
        before = len(await samples(s))
        for number in range(30):
            await s.chat(model=f"made-up-{number}")
            async with s.http.get(f"{s.url}/made/up/{number}"):
                pass
            async with s.http.get(f"{s.url}/v1/responses/resp_{number}"):
                pass
        assert len(await samples(s)) <= before + 12


async def test_shadows_are_counted_and_not_used() -> None:
    scheduling = {
        "plugins": [{"type": "round-robin-picker"}, {"type": "queue-scorer"}, {"type": "random-picker"}],
        "schedulingProfiles": [
            {"name": "default", "plugins": [{"pluginRef": "round-robin-picker"}]},
            {"name": "trial", "shadow": True, "plugins": [{"pluginRef": "random-picker"}]},
        ],
    }
    async with stack(2, settings={"scheduling": scheduling}) as s:
        served = [(await s.chat())[0].headers["x-kvlane-endpoint"] for _ in range(10)]
        assert sorted(served) == ["pod-0"] * 5 + ["pod-1"] * 5
        found = await samples(s)
        assert total(found, "kvlane_shadow_decisions_total", 'profile="trial"') == 10
        assert total(found, "kvlane_scheduling_decisions_total") == 10


async def test_a_retry_is_an_attempt() -> None:
    async with stack(2, settings=BLIND) as s:
        await s.pods[0].kill()
        for number in range(4):
            assert (await s.chat(f"question {number}"))[0].status == 200
        found = await samples(s)
        failed = total(found, "kvlane_attempts_total", 'endpoint="pod-0"', 'ending="upstream-failed"')
        assert failed == found["kvlane_retries_total"] >= 1
        assert total(found, "kvlane_attempts_total", 'endpoint="pod-1"', 'ending="complete"') == 4


async def test_pod_states_match_the_pods() -> None:
    async with stack(2) as s:
        assert (await samples(s))['kvlane_pool_ready_endpoints{pool="default"}'] == 2
        await s.pods[0].kill()
        await until(gone(s))
        found = await samples(s)
        assert found['kvlane_pool_ready_endpoints{pool="default"}'] == 1
        assert found['kvlane_endpoint_state{endpoint="pod-0",state="ejected"}'] == 1
        assert total(found, "kvlane_endpoint_state", 'endpoint="pod-0"') == 1


def gone(s: Stack) -> Callable[[], bool]:
    return lambda: len(s.app.fleet.ready) == 1
