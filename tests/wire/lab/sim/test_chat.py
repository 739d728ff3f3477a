from __future__ import annotations

import asyncio

import aiohttp
import orjson
import pytest

from proxy.lab.sim import SimPod
from tests.helpers.lab.sim.support import CHAT, USER, post, stream

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "days", "unit"],
        },
    },
}
ARGUMENTS = {"city": "sim", "days": 1, "unit": "C"}


async def test_the_role_precedes_the_words(client: aiohttp.ClientSession) -> None:
    whole = await post(client, CHAT, messages=USER, max_tokens=5)
    first, *rest, done = await stream(client, CHAT, messages=USER, max_tokens=5)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    assert (
        "".join(event["choices"][0]["delta"]["content"] for event in rest)
        == (whole["choices"][0]["message"]["content"])
    )
    assert rest[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_a_final_message_is_continued_with_the_remaining_text(client: aiohttp.ClientSession) -> None:
    whole = (await post(client, CHAT, messages=USER, max_tokens=20))["choices"][0]["message"]["content"]
    begun = [*USER, {"role": "assistant", "content": whole[:24]}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    events = await stream(client, CHAT, messages=begun, max_tokens=14, **continued)
    rest = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    assert whole[:24] + rest == whole


async def test_the_next_turn_has_the_last_one_cached(client: aiohttp.ClientSession) -> None:
    question = [{"role": "user", "content": "long " * 100}]
    reply = (await post(client, CHAT, messages=question, max_tokens=64))["choices"][0]["message"]
    turn = [*question, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "more"}]
    usage = (await post(client, CHAT, messages=turn))["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 30


async def test_max_completion_tokens_bounds_the_response(client: aiohttp.ClientSession) -> None:
    reply = await post(client, CHAT, messages=USER, max_completion_tokens=7)
    assert reply["usage"]["completion_tokens"] == 7


async def test_the_request_id_of_the_client_is_the_id_of_the_response(client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT, json={"messages": USER}, headers={"X-Request-Id": "mine"}) as response:
        assert orjson.loads(await response.read())["id"] == "chatcmpl-mine"


async def test_a_required_tool_is_called(client: aiohttp.ClientSession) -> None:
    reply = await post(client, CHAT, messages=USER, tools=[TOOL], tool_choice="required")
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["function"]["name"] == "weather"
    assert orjson.loads(call["function"]["arguments"]) == ARGUMENTS


async def test_a_named_tool_is_called_in_parts(client: aiohttp.ClientSession) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    events = await stream(client, CHAT, messages=USER, tools=[TOOL], tool_choice=choice)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    pieces = [delta["tool_calls"][0]["function"] for delta in deltas[1:]]
    assert pieces[0] == {"name": "weather", "arguments": ""}
    assert orjson.loads("".join(piece["arguments"] for piece in pieces)) == ARGUMENTS
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_optional_tools_are_not_called(client: aiohttp.ClientSession) -> None:
    reply = await post(client, CHAT, messages=USER, tools=[TOOL], tool_choice="auto")
    assert reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "raw"),
    [(CHAT, rb'{"messages": [{"role": "user", "content": "\ud800"}]}'), ("/v1/responses", rb'{"input": "\ud800"}')],
)
async def test_texts_outside_unicode_are_harmless(client: aiohttp.ClientSession, path: str, raw: bytes) -> None:
    async with client.post(path, data=raw, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_any_request_id_is_valid_in_every_event(client: aiohttp.ClientSession, path: str) -> None:
    body = {"messages": USER, "input": "x", "stream": True}
    async with client.post(path, json=body, headers={"X-Request-Id": 'a"%d\\'}) as response:
        lines = [line[6:] for line in (await response.read()).split(b"\n") if line.startswith(b"data: {")]
    assert len([orjson.loads(line) for line in lines]) > 16


async def test_a_header_outside_unicode_is_logged(pod: SimPod) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.port)
    writer.write(b"POST /x HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\xff\r\nContent-Length: 0\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
    writer.close()
    assert pod.requests[0].id == "a?"
