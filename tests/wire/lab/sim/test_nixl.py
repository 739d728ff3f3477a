from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from proxy.lab.sim import Fault, FaultKind, TransferTiming
from tests.helpers.lab.sim.support import USER, is_idle
from tests.helpers.lab.sim.transfers import COMPLETIONS, PROMPT, Pair, pair
from tests.helpers.waiting import PATIENCE, until

CHAT = "/v1/chat/completions"
SOURCES = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="%s"}'
KEPT = 'sim:kept_blocks{engine="0",model_name="sim"}'


async def test_a_prompt_is_computed_on_one_pod_and_continued_on_another() -> None:
    async with pair("nixl") as pods:
        _, whole = await pods.ask(pods.prefill, max_tokens=20)
        params = await pods.prefilled()
        status, reply = await pods.ask(pods.decode, max_tokens=20, kv_transfer_params=params)
        assert status == 200
        assert reply["choices"][0]["text"] == whole["choices"][0]["text"]
        assert reply["kv_transfer_params"] is None
        assert reply["usage"] == {
            "prompt_tokens": 100,
            "completion_tokens": 20,
            "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


async def test_a_prefill_response_equals_that_of_the_engine() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        assert params.pop("remote_request_id").startswith("cmpl-r-0-")
        assert params.pop("remote_engine_id")
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 8))],
            "remote_host": "127.0.0.1",
            "remote_port": pods.prefill.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": 100,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": 0,
        }


async def test_blocks_are_kept_until_they_are_pulled() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        assert pods.prefill.engine.kept_blocks == 7
        assert (await pods.metrics(pods.prefill))[KEPT] == 7
        assert pods.prefill.engine.kv_usage > 0
        await pods.ask(pods.decode, max_tokens=1, kv_transfer_params=params)
        assert pods.prefill.engine.kept_blocks == 0
        assert pods.prefill.engine.kv_usage == pods.decode.engine.kv_usage == 0


async def test_the_decode_pod_counts_transferred_tokens_and_computes_none_of_them() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        await pods.ask(pods.decode, max_tokens=5, kv_transfer_params=params)
        metrics = await pods.metrics(pods.decode)
        found = {name: metrics[SOURCES % name] for name in ("local_compute", "local_cache_hit", "external_kv_transfer")}
        assert found == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 100}


async def test_transferred_blocks_are_in_the_prefix_cache() -> None:
    async with pair("nixl") as pods:
        await pods.ask(pods.decode, max_tokens=5, kv_transfer_params=await pods.prefilled())
        _, reply = await pods.ask(pods.decode, max_tokens=5)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        await pods.ask(pods.decode, max_tokens=5, kv_transfer_params=await pods.prefilled())
        assert pods.decode.engine.stats.transferred_tokens == 104  # of the second time only what was not there


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 1}),
    ],
)
async def test_all_apis_transfer(path: str, body: dict[str, Any]) -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled(path, **body)
        status, _ = await pods.ask(pods.decode, path, **body, kv_transfer_params=params)
        assert status == 200
        assert pods.decode.engine.stats.transfers == 1


async def test_a_stream_has_no_transfer_parameters() -> None:
    async with pair("nixl") as pods:
        body = {"prompt": PROMPT, "max_tokens": 1, "stream": True, "kv_transfer_params": {"do_remote_decode": True}}
        async with pods.http.post(pods.prefill.url + COMPLETIONS, json=body) as response:
            assert b"kv_transfer_params" not in await response.read()
        assert pods.prefill.engine.kept_blocks == 7


async def test_a_plain_request_is_served_by_any_pod_and_keeps_nothing() -> None:
    async with pair("nixl") as pods:
        for pod in (pods.prefill, pods.decode):
            status, reply = await pods.ask(pod)
            assert (status, reply["kv_transfer_params"]) == (200, None)
            assert pod.engine.kept_blocks == 0


async def test_a_kept_cache_expires() -> None:
    async with pair("nixl", TransferTiming(expiry=0.05, failure=0.05)) as pods:
        params = await pods.prefilled()
        await until(lambda: not pods.prefill.engine.kept_blocks)
        assert pods.prefill.engine.stats.expired_transfers == 1
        status, reply = await pods.ask(pods.decode, kv_transfer_params=params)
        assert (status, reply["error"]["message"]) == (500, "Internal server error")
        assert pods.decode.engine.stats.failed_transfers == 1
        assert is_idle(pods.decode)
        assert pods.decode.engine.kv_usage == 0


async def test_blocks_are_pulled_once() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        assert [(await pods.ask(pods.decode, kv_transfer_params=params))[0] for _ in range(2)] == [200, 500]


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_port", "remote_request_id"])
async def test_a_pull_of_missing_blocks_fails_after_some_time(name: str) -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        loop = asyncio.get_running_loop()
        started = loop.time()
        status, _ = await pods.ask(pods.decode, kv_transfer_params={**params, name: "another"})
        assert status == 500
        assert loop.time() - started >= 0.1
        assert pods.prefill.engine.kept_blocks == 7


async def test_a_pull_from_a_dead_pod_fails_even_after_its_return() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        await pods.prefill.kill()
        assert (await pods.ask(pods.decode, kv_transfer_params=params))[0] == 500
        await pods.prefill.start(port=pods.prefill.port)
        assert (await pods.ask(pods.decode, kv_transfer_params=params))[0] == 500


async def test_a_stream_whose_pull_fails_has_an_error_event() -> None:
    async with pair("nixl") as pods:
        params = {**(await pods.prefilled()), "remote_engine_id": "another"}
        body = {"prompt": PROMPT, "stream": True, "kv_transfer_params": params}
        async with pods.http.post(pods.decode.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
            events = (await response.text()).split("\n\n")
        assert events[0].startswith('data: {"error":{"message":"Internal server error"')
        assert events[1:] == ["data: [DONE]", ""]


async def test_parameters_without_an_engine_crash_the_engine() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled()
        del params["remote_engine_id"]
        running = asyncio.ensure_future(pods.ask(pods.decode, max_tokens=100_000, request_id="beside"))
        await until(lambda: len(pods.decode.engine.running) == 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pods.ask(pods.decode, kv_transfer_params=params), 0.2)
        assert (await running)[0] == 500
        status, reply = await pods.ask(pods.decode)
        assert status == 500
        assert "EngineCore" in reply["error"]["message"]
        async with pods.http.get(pods.decode.url + "/health") as health:
            assert health.status == 503


async def leaves(pods: Pair, **body: Any) -> None:
    """A client of the decode pod, once it is waiting."""
    pending = asyncio.ensure_future(pods.ask(pods.decode, **body))
    await until(lambda: bool(pods.decode.engine.loading or pods.decode.engine.waiting))
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await until(lambda: not (pods.decode.engine.loading or pods.decode.engine.waiting))


async def test_a_client_that_leaves_while_blocks_are_pulled_frees_them() -> None:
    async with pair("nixl", TransferTiming(base=60)) as pods:
        await leaves(pods, kv_transfer_params=await pods.prefilled())
        assert pods.prefill.engine.kept_blocks == pods.decode.engine.kv_usage == 0


async def test_a_client_that_leaves_the_decode_queue_frees_them() -> None:
    async with pair("nixl", max_num_seqs=1) as pods:
        params = await pods.prefilled()
        first = asyncio.ensure_future(pods.ask(pods.decode, max_tokens=100_000))
        await until(lambda: len(pods.decode.engine.running) == 1)
        await leaves(pods, kv_transfer_params=params)
        assert pods.prefill.engine.kept_blocks == 0
        first.cancel()


async def test_a_cancelled_prefill_keeps_nothing() -> None:
    async with pair("nixl", max_num_batched_tokens=1) as pods:
        pending = asyncio.ensure_future(pods.prefilled())
        await until(lambda: len(pods.prefill.engine.running) == 1)
        pending.cancel()
        await until(lambda: is_idle(pods.prefill))
        assert pods.prefill.engine.kept_blocks == 0


async def test_requests_wait_for_kept_blocks() -> None:
    async with pair("nixl", num_gpu_blocks=10) as pods:
        params = await pods.prefilled()
        other = asyncio.ensure_future(pods.ask(pods.prefill, prompt="else" * 100))
        await until(lambda: len(pods.prefill.engine.waiting) == 1)
        await asyncio.sleep(0.05)
        assert not other.done()
        await pods.ask(pods.decode, max_tokens=1, kv_transfer_params=params)
        assert (await asyncio.wait_for(other, PATIENCE))[0] == 200


async def test_several_choices_leave_all_but_the_first_to_expire() -> None:
    async with pair("nixl") as pods:
        params = await pods.prefilled(n=3)
        await pods.ask(pods.decode, kv_transfer_params=params)
        assert pods.prefill.engine.kept_blocks > 0


async def test_a_lost_transfer_is_gone_before_it_is_pulled() -> None:
    async with pair("nixl") as pods:
        pods.prefill.faults.set([Fault(FaultKind.LOST_TRANSFER)])
        params = await pods.prefilled()
        assert params["remote_engine_id"]
        assert pods.prefill.engine.kept_blocks == 0
        assert (await pods.ask(pods.decode, kv_transfer_params=params))[0] == 500


async def test_a_failed_pull_leaves_the_blocks() -> None:
    async with pair("nixl") as pods:
        pods.decode.faults.set([Fault(FaultKind.LOST_TRANSFER)])
        params = await pods.prefilled()
        assert (await pods.ask(pods.decode, kv_transfer_params=params))[0] == 500


async def test_a_slow_transfer_takes_its_time() -> None:
    async with pair("nixl", TransferTiming(base=0.02)) as pods:
        pods.decode.faults.set([Fault(FaultKind.SLOW_TRANSFER, factor=10)])
        loop, params = asyncio.get_running_loop(), await pods.prefilled()
        started = loop.time()
        assert (await pods.ask(pods.decode, kv_transfer_params=params))[0] == 200
        assert loop.time() - started >= 0.2
        assert pods.decode.engine.stats.transfer_seconds >= 0.2


async def test_a_crashed_engine_ends_running_requests_and_returns() -> None:
    async with pair("nixl") as pods:
        pods.decode.faults.set([Fault(FaultKind.ENGINE_DEAD, seconds=0.1)])
        assert (await pods.ask(pods.decode))[0] == 500
        pods.decode.faults.set(())
        assert pods.decode.condition.history[0][0] is FaultKind.ENGINE_DEAD

        async def is_back() -> bool:
            try:
                return (await pods.ask(pods.decode))[0] == 200
            except aiohttp.ClientError:
                return False

        async with asyncio.timeout(PATIENCE):
            while not await is_back():
                await asyncio.sleep(0.01)
