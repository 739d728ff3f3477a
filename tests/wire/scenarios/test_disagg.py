"""Prompts that one pod computes and another decodes, as clients and pods see it when all is well."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.lab.sim.config import ConnectorName
from tests.helpers.scenarios.disagg import (
    CONNECTORS,
    PROMPT,
    TOKENS,
    ask,
    decodes,
    disaggregated,
    prefills,
    settled,
    transfers,
    whole_text,
)
from tests.helpers.scenarios.stack import CHAT, Stack

HELLO = {"messages": [{"role": "user", "content": PROMPT}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SPLIT: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, HELLO),
    "chat with logprobs": (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}),
    "chat with tools": (CHAT, {**HELLO, "tools": [TOOL]}),
    "chat with max_completion_tokens": (CHAT, {**HELLO, "max_completion_tokens": TOKENS}),
    "completion": ("/v1/completions", {"prompt": PROMPT}),
    "completion of tokens": ("/v1/completions", {"prompt": list(range(100))}),
    "completion of one prompt in a list": ("/v1/completions", {"prompt": [PROMPT]}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": TOKENS}),
    "messages": ("/v1/messages", {**HELLO, "max_tokens": TOKENS}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "several choices": (CHAT, {**HELLO, "n": 2}),
    "a forced tool": (CHAT, {**HELLO, "tools": [TOOL], "tool_choice": "required"}),
    "beams": (CHAT, {**HELLO, "use_beam_search": True}),
    "several prompts": ("/v1/completions", {"prompt": [PROMPT, PROMPT + "!"]}),
    "prompt logprobs": ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 1}),
    "embeddings": ("/v1/embeddings", {"input": PROMPT}),
}


async def post(proxy: Stack, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    async with proxy.http.post(proxy.url + path, json={"model": "sim", **body}, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_a_response_equals_that_of_a_single_pod(connector: ConnectorName, stream: bool) -> None:
    async with disaggregated(connector) as proxy:
        received = await ask(proxy, stream=stream)
        assert (received.status, received.is_whole) == (200, True)
        assert received.text == await whole_text()
        assert received.headers["x-kvlane-endpoint"] in ("pod-2", "pod-3")
        assert [sum(len(pod.requests) for pod in pods) for pods in (prefills(proxy), decodes(proxy))] == [1, 1]
        assert transfers(proxy) == 1
        await settled(proxy)


@pytest.mark.parametrize("case", SPLIT)
async def test_every_api_is_split(case: str) -> None:
    path, body = SPLIT[case]
    async with disaggregated() as proxy:
        status, payload = await post(proxy, path, body)
        assert status == 200, payload
        assert not payload.get("kv_transfer_params")
        assert transfers(proxy) == 1
        [prefill] = [record for pod in prefills(proxy) for record in pod.requests]
        assert (prefill.path, prefill.generated_tokens) == (path, 1)
        await settled(proxy)


@pytest.mark.parametrize("case", WHOLE)
async def test_a_request_that_cannot_be_split_is_served_by_one_pod(case: str) -> None:
    path, body = WHOLE[case]
    async with disaggregated() as proxy:
        status, payload = await post(proxy, path, body)
        assert status == 200, payload
        assert sum(len(pod.requests) for pod in decodes(proxy)) == 1
        assert not any(len(pod.requests) for pod in prefills(proxy))
        await settled(proxy)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_both_pods_get_the_clients_headers_and_request_id(connector: ConnectorName) -> None:
    async with disaggregated(connector) as proxy:
        headers = {
            "authorization": "Bearer mine",
            "x-tenant": "t",
            "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        }
        status, _ = await post(proxy, CHAT, HELLO, **headers, **{"x-request-id": "mine"})
        assert status == 200
        records = [record for pod in proxy.pods for record in pod.requests]
        assert len(records) == 2
        for record in records:
            assert {name: record.headers.get(name) for name in headers} == headers
            assert "mine" in record.id
        if connector != "p2p-nccl":
            assert {record.id for record in records} == {"mine"}


async def test_only_the_clients_response_may_be_compressed() -> None:
    """What has to be read here could not be."""
    async with disaggregated() as proxy:
        await post(proxy, CHAT, HELLO, **{"accept-encoding": "gzip, br"})
        read = {pod.config.role: record.headers.get("accept-encoding") for pod in proxy.pods for record in pod.requests}
        assert read == {"prefill": None, "decode": "gzip, br"}


async def test_the_response_has_the_clients_request_id_where_pods_have_another() -> None:
    async with disaggregated("p2p-nccl") as proxy:
        received = await ask(proxy, stream=False, request_id="mine")
        assert received.headers["x-request-id"] == "mine"


async def test_a_pod_with_its_own_key_gets_it_on_its_attempt() -> None:
    keys = [{"apiKey": f"key-{index}"} for index in range(4)]
    async with disaggregated(each=keys) as proxy:
        await post(proxy, CHAT, HELLO, authorization="Bearer mine")
        body = {pod.config.role: record.headers["authorization"] for pod in proxy.pods for record in pod.requests}
        assert body["prefill"] in ("Bearer key-0", "Bearer key-1")
        assert body["decode"] in ("Bearer key-2", "Bearer key-3")


async def test_the_next_turn_of_a_stored_response_goes_to_its_decode_pod() -> None:
    path, body = SPLIT["responses"]
    async with disaggregated() as proxy:
        for number in range(4):
            status, first = await post(proxy, path, body, **{"x-request-id": f"r{number}"})
            assert status == 200
            following = {"input": "And then?", "previous_response_id": first["id"]}
            status, second = await post(proxy, path, following, **{"x-request-id": f"s{number}"})
            assert status == 200, second
            async with proxy.http.get(f"{proxy.url}{path}/{first['id']}") as response:
                assert (await response.json())["output"] == first["output"]
        await settled(proxy)


async def test_the_next_turn_of_a_stored_response_is_refused_where_the_connector_needs_both_pods() -> None:
    path, body = SPLIT["responses"]
    async with disaggregated("p2p-nccl") as proxy:
        status, first = await post(proxy, path, body)
        assert status == 200
        sent = [len(pod.requests) for pod in proxy.pods]
        status, refused = await post(proxy, path, {"input": "And?", "previous_response_id": first["id"]})
        assert (status, refused["error"]["code"]) == (503, "no_endpoints")
        assert [len(pod.requests) for pod in proxy.pods] == sent


async def test_a_stream_without_requested_usage_has_none() -> None:
    async with disaggregated() as proxy:
        body = {"model": "sim", **HELLO, "stream": True}
        async with proxy.http.post(proxy.url + CHAT, json=body) as response:
            assert b"usage" not in await response.read()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_the_usage_has_the_cached_tokens_of_the_prefill_pod(connector: ConnectorName, stream: bool) -> None:
    """One pod of each kind, so that the second request comes to the same ones."""
    async with disaggregated(connector, roles=("prefill", "decode")) as proxy:
        first = await ask(proxy, stream=stream)
        for pod in decodes(proxy):
            pod.engine.forget_prefixes()
        second = await ask(proxy, stream=stream)
    tokens = first.usage["prompt_tokens"]
    cached = [received.usage["prompt_tokens_details"]["cached_tokens"] for received in (first, second)]
    assert cached == [0, (tokens - 1) // 16 * 16]
    assert second.usage["prompt_tokens"] == tokens
    assert second.usage["completion_tokens"] == TOKENS
    assert second.usage["total_tokens"] == tokens + TOKENS


@pytest.mark.parametrize("api", ["/v1/messages", "/v1/responses"])
async def test_the_usage_of_other_apis_has_them_too(api: str) -> None:
    path, body = SPLIT["messages" if "messages" in api else "responses"]
    async with disaggregated(roles=("prefill", "decode")) as proxy:
        await post(proxy, path, body)
        for pod in decodes(proxy):
            pod.engine.forget_prefixes()
        _, payload = await post(proxy, path, body)
    usage = payload["usage"]
    cached = usage.get("cache_read_input_tokens", usage.get("input_tokens_details", {}).get("cached_tokens"))
    assert cached == (usage["input_tokens"] - 1) // 16 * 16


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("params", [{"do_remote_prefill": True}, {"do_remote_decode": True}])
@pytest.mark.parametrize("case", ["split", "whole"])
async def test_transfer_fields_of_clients_reach_no_pod(case: str, params: dict[str, Any], stream: bool) -> None:
    """It could crash an engine, or keep blocks for no request."""
    async with disaggregated() as proxy:
        choices = 2 if case == "whole" else 1
        received = await ask(proxy, stream=stream, kv_transfer_params=params, n=choices)
        assert (received.status, received.is_whole) == (200, True)
        assert not any(pod.condition.history for pod in proxy.pods)
        await settled(proxy)


async def test_many_concurrent_requests_with_a_long_prompt_leave_nothing_behind() -> None:
    async with disaggregated() as proxy:
        received = await asyncio.gather(
            *(ask(proxy, stream=index % 2 == 0, request_id=f"r{index}") for index in range(40))
        )
        assert all(one.is_whole for one in received)
        assert all(len(pod.requests) > 5 for pod in proxy.pods)
        await settled(proxy)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_concurrent_requests_with_one_id_have_separate_transfers(connector: ConnectorName) -> None:
    """A client may send what it likes as an id."""
    async with disaggregated(connector) as proxy:
        tasks = [
            ask(proxy, stream=index % 2 == 0, messages=[{"role": "user", "content": f"{index}: {PROMPT}"}])
            for index in range(12)
        ]
        received = await asyncio.gather(*tasks)
        assert [(one.status, one.is_whole, one.error) for one in received] == [(200, True, "")] * 12
        assert sum(pod.engine.stats.failed_transfers for pod in proxy.pods) == 0
        assert transfers(proxy) == 12
        await settled(proxy)


async def test_pods_with_both_roles_compute_for_each_other() -> None:
    async with disaggregated(roles=("both",) * 3) as proxy:
        for index in range(6):
            assert (await ask(proxy, stream=True, user=str(index))).is_whole
        assert transfers(proxy) == 6
        await settled(proxy)
