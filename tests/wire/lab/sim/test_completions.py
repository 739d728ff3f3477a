from __future__ import annotations

import aiohttp
import orjson

from proxy.lab.sim import SimConfig, SimPod
from tests.helpers.lab.sim.support import post, stream

PATH = "/v1/completions"


async def test_the_stream_has_the_text_of_the_whole_response(client: aiohttp.ClientSession) -> None:
    whole = await post(client, PATH, prompt="the sea", max_tokens=12)
    *events, done = await stream(client, PATH, prompt="the sea", max_tokens=12)
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 11 + ["length"]
    assert "usage" not in events[-1]


async def test_a_continuation_has_exactly_the_remaining_text(client: aiohttp.ClientSession) -> None:
    whole = (await post(client, PATH, prompt="the sea", max_tokens=20))["choices"][0]["text"]
    async with SimPod(SimConfig(time_scale=20)) as other, aiohttp.ClientSession(other.url) as elsewhere:
        rest = await post(elsewhere, PATH, prompt="the sea" + whole[:28], max_tokens=13)
    assert whole[:28] + rest["choices"][0]["text"] == whole


async def test_every_prompt_of_a_batch_gets_every_choice(client: aiohttp.ClientSession) -> None:
    body = {"prompt": ["one", "two"], "n": 2, "max_tokens": 3}
    whole = await post(client, PATH, **body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in whole["choices"]}) == 4
    assert whole["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 2,
        "total_tokens": 14,
        "completion_tokens": 12,
        "prompt_tokens_details": None,
    }
    streamed = dict.fromkeys(range(4), "")
    for event in (await stream(client, PATH, **body))[:-1]:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(streamed.values()) == [choice["text"] for choice in whole["choices"]]


async def test_the_last_event_has_the_usage(client: aiohttp.ClientSession) -> None:
    await post(client, PATH, prompt="x" * 200)
    events = await stream(client, PATH, prompt="x" * 200, max_tokens=4, stream_options={"include_usage": True})
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 50,
        "total_tokens": 54,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 48},
    }


async def test_every_event_can_have_the_usage_so_far(client: aiohttp.ClientSession) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream(client, PATH, prompt="x", max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 3]


async def test_a_stop_string_ends_the_response(client: aiohttp.ClientSession) -> None:
    text = (await post(client, PATH, prompt="p", max_tokens=8))["choices"][0]["text"]
    choice = (await post(client, PATH, prompt="p", max_tokens=8, stop=text[10:14]))["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text[:10], "stop", text[10:14])
    events = await stream(client, PATH, prompt="p", max_tokens=8, stop=[text[10:14]])
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text[:10]


async def test_token_ids_are_the_prompt_they_stand_for(client: aiohttp.ClientSession) -> None:
    tokens = (await post(client, "/tokenize", prompt="the wide sea"))["tokens"]
    assert (await post(client, "/detokenize", tokens=tokens))["prompt"] == "the wide sea"
    as_tokens = await post(client, PATH, prompt=tokens)
    as_text = await post(client, PATH, prompt="the wide sea")
    assert as_tokens["choices"] == as_text["choices"]
    assert as_tokens["usage"]["prompt_tokens"] == len(tokens) == 3


async def test_salts_and_adapters_have_their_own_prefixes() -> None:
    config = SimConfig(time_scale=20, lora_adapters=("tuned",))
    async with SimPod(config) as pod, aiohttp.ClientSession(pod.url) as client:
        cached = []
        for extra in ({}, {}, {"cache_salt": "s"}, {"model": "tuned"}, {"model": "tuned"}):
            reply = await post(client, PATH, prompt="x" * 400, **extra)
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 96, 0, 0, 96]
        assert reply["model"] == "tuned"


async def test_the_response_ends_with_the_context() -> None:
    config = SimConfig(time_scale=20, max_model_len=100)
    async with SimPod(config) as pod, aiohttp.ClientSession(pod.url) as client:
        reply = await post(client, PATH, prompt="x" * 392, max_tokens=40)
        assert reply["usage"]["completion_tokens"] == 2


async def test_a_pod_may_hide_its_cache_hits() -> None:
    config = SimConfig(time_scale=20, prompt_tokens_details=False)
    async with SimPod(config) as pod, aiohttp.ClientSession(pod.url) as client:
        assert (await post(client, PATH, prompt="x"))["usage"]["prompt_tokens_details"] is None


async def test_events_are_whole_chunks(client: aiohttp.ClientSession) -> None:
    async with client.post(PATH, json={"prompt": "x", "stream": True, "max_tokens": 3}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        events = (await response.read()).split(b"\n\n")
    assert [event[:6] for event in events] == [b"data: "] * 4 + [b""]
    assert all(orjson.loads(event[6:]) for event in events[:3])


async def test_the_headers_of_a_stream_precede_its_first_token() -> None:
    endless = {"prompt": "x", "max_tokens": 100_000, "stream": True}
    async with (
        SimPod(SimConfig(max_num_seqs=1)) as pod,
        aiohttp.ClientSession(pod.url) as client,
        client.post(PATH, json=endless),
        client.post(PATH, json=endless) as queued,
    ):
        assert queued.status == 200
        assert len(pod.engine.waiting) == 1
