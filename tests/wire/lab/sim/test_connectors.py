"""The connectors other than NIXL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.lab.sim import Fault, FaultKind, TransferTiming
from proxy.lab.sim.config import ConnectorName
from tests.helpers.lab.sim.support import is_idle
from tests.helpers.lab.sim.transfers import Pair, pair
from tests.helpers.waiting import until

BOOTSTRAP: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
MOONCAKE_PREFILL = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "x"}}
MOONCAKE_DECODE = {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "x"}}
AT_ONCE: list[tuple[ConnectorName, dict[str, Any], dict[str, Any]]] = [
    ("mooncake", MOONCAKE_PREFILL, MOONCAKE_DECODE),
    ("sglang", BOOTSTRAP, BOOTSTRAP),
]
at_once = pytest.mark.parametrize(("connector", "prefill", "decode"), AT_ONCE, ids=["mooncake", "sglang"])
ADDRESSED = "___prefill_addr_127.0.0.1:14579___decode_addr_127.0.0.1:14580_r"


async def test_a_prompt_is_found_in_the_common_directory() -> None:
    async with pair("shared-storage") as pods:
        _, first = await pods.ask(pods.prefill, max_tokens=1)
        assert first["kv_transfer_params"] is None
        _, reply = await pods.ask(pods.decode, max_tokens=5)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert pods.decode.engine.stats.external_tokens == 96
        assert pods.prefill.engine.kept_blocks == 0


async def test_only_exactly_the_same_prompt_is_found() -> None:
    async with pair("shared-storage") as pods:
        await pods.ask(pods.prefill, max_tokens=1)
        await pods.ask(pods.decode, prompt="word" * 120, max_tokens=1)
        await pods.ask(pods.decode, cache_salt="s", max_tokens=1)
        assert pods.decode.engine.stats.transfers == 0


async def test_a_load_from_the_directory_can_fail() -> None:
    async with pair("shared-storage") as pods:
        await pods.ask(pods.prefill, max_tokens=1)
        pods.decode.faults.set([Fault(FaultKind.LOST_TRANSFER)])
        assert (await pods.ask(pods.decode, max_tokens=1))[0] == 500


async def together(pods: Pair, prefill: dict[str, Any], decode: dict[str, Any]) -> list[tuple[int, Any]]:
    requested = (pods.ask(pods.decode, max_tokens=20, **decode), pods.ask(pods.prefill, max_tokens=1, **prefill))
    return list(await asyncio.gather(*requested))


@at_once
async def test_two_simultaneous_requests_find_each_other(
    connector: ConnectorName, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    async with pair(connector) as pods:
        replies = await together(pods, prefill, decode)
        assert [status for status, _ in replies] == [200, 200]
        assert replies[0][1]["usage"]["completion_tokens"] == 20
        assert pods.decode.engine.stats.transferred_tokens == 100
        assert pods.prefill.engine.kept_blocks == 0


@at_once
async def test_the_decode_pod_waits_while_the_prefill_pod_computes(
    connector: ConnectorName, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    async with pair(connector, TransferTiming(failure=0.05), max_num_batched_tokens=8) as pods:
        replies = await together(pods, prefill, decode)
        assert [status for status, _ in replies] == [200, 200]


@at_once
async def test_a_missing_prefill_fails_the_decode(
    connector: ConnectorName, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    async with pair(connector) as pods:
        assert (await pods.ask(pods.decode, **decode))[0] == 500
        assert is_idle(pods.decode)


@at_once
async def test_a_crashed_prefill_fails_the_decode(
    connector: ConnectorName, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    async with pair(connector, max_num_batched_tokens=1) as pods:
        first = asyncio.ensure_future(pods.ask(pods.prefill, **prefill))
        second = asyncio.ensure_future(pods.ask(pods.decode, **decode))
        await until(lambda: bool(pods.prefill.engine.running and pods.decode.engine.loading))
        await pods.prefill.kill()
        assert (await second)[0] == 500
        await asyncio.wait([first])
        assert first.exception() is not None


@at_once
async def test_an_abandoned_decode_frees_the_prefill_pod(
    connector: ConnectorName, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    async with pair(connector, TransferTiming(base=60)) as pods:
        first = asyncio.ensure_future(pods.ask(pods.prefill, max_tokens=1, **prefill))
        second = asyncio.ensure_future(pods.ask(pods.decode, **decode))
        await until(lambda: bool(pods.prefill.engine.kept and pods.decode.engine.loading))
        second.cancel()
        await until(lambda: not pods.prefill.engine.kept_blocks)
        await asyncio.wait([first])


async def test_a_bootstrap_id_that_no_pod_uses_fails_the_prefill() -> None:
    async with pair("sglang", TransferTiming(expiry=0.05)) as pods:
        assert (await pods.ask(pods.prefill, max_tokens=1, **BOOTSTRAP))[0] == 500
        assert pods.prefill.engine.kept_blocks == 0


async def test_pods_with_a_role_refuse_requests_without_a_bootstrap_id() -> None:
    async with pair("sglang") as pods:
        for pod in (pods.prefill, pods.decode):
            status, reply = await pods.ask(pod)
            assert status == 400
            assert "without bootstrap room id" in reply["error"]["message"]


async def test_several_choices_need_several_bootstrap_ids() -> None:
    async with pair("sglang") as pods:
        body: dict[str, Any] = {**BOOTSTRAP, "n": 2}
        assert (await pods.ask(pods.decode, **body))[0] == 400
        replies = await together(pods, {**body, "bootstrap_room": [1, 2]}, {**body, "bootstrap_room": [1, 2]})
        assert [status for status, _ in replies] == [200, 200]


async def test_a_transfer_without_an_id_is_no_transfer() -> None:
    async with pair("mooncake") as pods:
        assert (await pods.ask(pods.decode))[0] == 200
        assert pods.decode.engine.stats.transfers == 0


async def test_pushed_blocks_wait_for_the_request_of_the_same_id() -> None:
    async with pair("p2p-nccl") as pods:
        await pods.ask(pods.prefill, request_id=ADDRESSED, max_tokens=1)
        assert pods.prefill.engine.kept_blocks == 0
        status, _ = await pods.ask(pods.decode, request_id=ADDRESSED, max_tokens=5)
        assert (status, pods.decode.engine.stats.transferred_tokens) == (200, 100)


async def test_an_id_without_addresses_is_served_by_no_pod_with_a_role() -> None:
    async with pair("p2p-nccl") as pods:
        assert (await pods.ask(pods.prefill))[0] == 500
        assert (await pods.ask(pods.decode))[0] == 500
