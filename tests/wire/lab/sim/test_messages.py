from __future__ import annotations

import aiohttp
import orjson

from tests.helpers.lab.sim.support import USER, post

PATH = "/v1/messages"


async def test_a_complete_message(client: aiohttp.ClientSession) -> None:
    message = await post(client, PATH, model="sim", max_tokens=4, messages=USER)
    assert (message["type"], message["role"], message["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert len(message["content"][0]["text"]) == 16
    assert message["usage"]["output_tokens"] == 4


async def test_a_streamed_message(client: aiohttp.ClientSession) -> None:
    whole = await post(client, PATH, max_tokens=3, messages=USER)
    async with client.post(PATH, json={"max_tokens": 3, "messages": USER, "stream": True}) as response:
        lines = (await response.text()).splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [orjson.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    deltas = ["content_block_delta"] * 3
    assert names == [
        *("message_start", "content_block_start", *deltas, "content_block_stop", "message_delta", "message_stop")
    ]
    assert "".join(event["delta"]["text"] for event in events[2:5]) == whole["content"][0]["text"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_a_stop_sequence_is_named(client: aiohttp.ClientSession) -> None:
    text = (await post(client, PATH, max_tokens=8, messages=USER))["content"][0]["text"]
    message = await post(client, PATH, max_tokens=8, messages=USER, stop_sequences=[text[4:8]])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[4:8])


async def test_the_system_prompt_counts_and_is_cached(client: aiohttp.ClientSession) -> None:
    body = {"messages": USER, "system": "rule " * 80, "max_tokens": 1}
    counted = (await post(client, f"{PATH}/count_tokens", **body))["input_tokens"]
    first = await post(client, PATH, **body)
    second = await post(client, PATH, **body)
    assert first["usage"]["input_tokens"] == counted > 100
    assert first["usage"]["cache_read_input_tokens"] == 0
    assert second["usage"]["cache_read_input_tokens"] > 80
