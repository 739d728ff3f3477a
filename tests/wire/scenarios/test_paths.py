"""Every inference path besides chat: the pod's own response through the proxy, and the proxy's errors in its shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.lab.sim import SimConfig, StepTiming
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.02, per_prefill_token=0.0))
USER = [{"role": "user", "content": "Tell me of the sea."}]

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "the sea"}),
    ("/v1/completions", {"prompt": [1, 2, 3, 4]}),
    ("/v1/completions", {"prompt": ["the sea", "the land"]}),
    ("/v1/completions", {"prompt": [[1, 2], [3, 4]]}),
    ("/v1/embeddings", {"input": "the sea"}),
    ("/v1/embeddings", {"input": ["the sea", "the land"]}),
    ("/v1/embeddings", {"input": [[1, 2], [3]]}),
    ("/v1/embeddings", {"messages": USER}),
    ("/pooling", {"input": "the sea"}),
    ("/classify", {"input": ["the sea"]}),
    ("/score", {"text_1": "the sea", "text_2": ["salt", "sand"]}),
    ("/v1/score", {"text_1": ["the sea"], "text_2": ["salt"]}),
    ("/rerank", {"query": "the sea", "documents": ["salt", "sand"]}),
    ("/v1/rerank", {"query": "the sea", "documents": ["salt"]}),
    ("/v2/rerank", {"query": "the sea", "documents": ["salt"]}),
    ("/tokenize", {"prompt": "the sea"}),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/messages", {"messages": USER, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/v1/responses", {"input": "the sea"}),
]


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[f"{path}-{number}" for number, (path, _) in enumerate(CALLS)])
async def test_the_response_through_the_proxy_equals_the_pods(path: str, body: dict[str, Any]) -> None:
    headers = {"x-request-id": "same"}
    async with stack(1) as s:
        response, proxied = await s.post(path, {"model": "sim", **body}, headers)
        async with s.http.post(s.pods[0].url + path, json={"model": "sim", **body}, headers=headers) as straight:
            assert straight.status == response.status == 200
            assert steady(proxied) == steady(await straight.json())
        await s.idle()


def steady(body: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two calls: when it was, and how much of the prompt was cached by then."""
    return {name: value for name, value in body.items() if not name.startswith(("created", "usage"))}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(4000))},
        {"prompt": ["warm words " * 800]},
        {"prompt": ["warm words " * 800, "warm words " * 800]},
        {"prompt": [list(range(4000)), list(range(4000))]},
    ],
    ids=["tokens", "text", "texts", "batch of tokens"],
)
async def test_prompts_of_every_form_go_to_their_cache(body: dict[str, Any]) -> None:
    async with stack(4) as s:
        first, _ = await s.post("/v1/completions", {"model": "sim", "max_tokens": 1, **body})
        for _ in range(3):
            response, payload = await s.post("/v1/completions", {"model": "sim", "max_tokens": 1, **body})
            assert response.headers["x-kvlane-endpoint"] == first.headers["x-kvlane-endpoint"]
            assert payload["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


async def test_a_stream_of_messages_equals_the_pods() -> None:
    body = {"model": "sim", "messages": USER, "max_tokens": 4, "stream": True}
    headers = {"x-request-id": "same"}
    async with stack(1) as s:
        streams = []
        for url in (s.url, s.pods[0].url):
            async with s.http.post(url + "/v1/messages", json=body, headers=headers) as response:
                assert response.content_type == "text/event-stream"
                streams.append([line for line in (await response.text()).splitlines() if "usage" not in line])
        assert streams[0] == streams[1]
        assert "event: message_stop" in streams[0]


async def test_refusals_of_messages_have_the_shape_of_that_api() -> None:
    async with stack(1, settings={"listen": {"maxBody": "64KiB"}}) as s:
        assert await refused(s, {"model": "nope", "messages": USER}) == (404, "not_found_error")
        assert await refused(s, {"model": "sim", "messages": "no list"}) == (400, "invalid_request_error")
        assert await refused(s, {"model": "sim", "messages": USER, "system": "x" * 100_000}) == (
            413,
            "request_too_large",
        )
        await s.pods[0].kill()
        await until(lambda: not s.app.fleet.ready)
        assert await refused(s, {"model": "sim", "messages": USER}) == (503, "overloaded_error")


async def refused(s: Stack, body: Any) -> tuple[int, str]:
    response, payload = await s.post("/v1/messages", body, {"x-request-id": "mine"})
    assert (payload["type"], payload["request_id"]) == ("error", "mine")
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-kvlane-reason"]
    return response.status, payload["error"]["type"]


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/messages", {"messages": USER, "max_tokens": 2000}, {"type": "error", "error": {"type": "api_error"}}),
        ("/v1/responses", {"input": "the sea", "max_output_tokens": 2000}, {"type": "error", "code": "server_error"}),
        (CHAT, {"messages": USER, "max_tokens": 2000}, {"error": {"type": "server_error", "code": "upstream_failed"}}),
        ("/v1/completions", {"prompt": "the sea", "max_tokens": 2000}, {"error": {"type": "server_error"}}),
    ],
)
async def test_a_broken_stream_ends_with_an_error_event_of_its_api(
    path: str, body: dict[str, Any], error: dict[str, Any]
) -> None:
    async with stack(1, SLOW) as s:
        async with s.http.post(s.url + path, json={"model": "sim", "stream": True, **body}) as response:
            await response.content.readuntil(b"\n\n")
            await s.pods[0].kill()
            last = (await response.read()).decode().rstrip().split("\n\n")[-1]
        event = json.loads(last.partition("data: ")[2])
        assert contains(event, error), event
        await s.idle()


def contains(given: Any, part: Any) -> bool:
    if not isinstance(part, dict):
        return bool(given == part)
    return isinstance(given, dict) and all(contains(given.get(name), value) for name, value in part.items())


async def test_streams_of_other_apis_are_aborted_when_their_client_leaves() -> None:
    calls = [
        ("/v1/messages", {"messages": USER, "max_tokens": 2000}),
        ("/v1/responses", {"input": "the sea", "max_output_tokens": 2000}),
        ("/v1/completions", {"prompt": "the sea", "max_tokens": 2000}),
    ]
    async with stack(1, SLOW) as s:
        for number, (path, body) in enumerate(calls):
            async with s.http.post(s.url + path, json={"model": "sim", "stream": True, **body}) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
            await until(lambda gone=number + 1: s.pods[0].requests.aborted == gone)  # type: ignore[misc]
        await s.idle()


async def test_an_omitted_model_goes_to_pods_of_the_only_one() -> None:
    async with stack(2, [SimConfig(), SimConfig(lora_adapters=("adapter",))]) as s:
        for path, body in CALLS:
            response, _ = await s.post(path, body)
            assert response.status == 200, path


async def test_with_several_models_one_must_be_named() -> None:
    async with stack(2, [SimConfig(model="one"), SimConfig(model="two")]) as s:
        response, body = await s.post("/v1/embeddings", {"input": "the sea"})
        assert (response.status, body["error"]["param"]) == (400, "model")
        assert "one, two" in body["error"]["message"]


async def test_concurrent_requests_of_many_kinds_do_not_mix() -> None:
    async with stack(3) as s:

        async def ask(number: int) -> None:
            path, body = CALLS[number % len(CALLS)]
            response, payload = await s.post(path, {"model": "sim", **body}, {"x-request-id": f"id-{number}"})
            assert response.status == 200
            assert response.headers["x-request-id"] == f"id-{number}"
            assert f"id-{number}" in payload.get("id", f"id-{number}")

        await asyncio.gather(*(ask(number) for number in range(120)))
        await s.idle()
