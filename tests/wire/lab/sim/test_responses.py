from __future__ import annotations

import aiohttp
import orjson

from proxy.lab.sim import SimConfig, SimPod
from tests.helpers.lab.sim.support import is_idle, post, refusal
from tests.helpers.waiting import until

PATH = "/v1/responses"


async def test_the_events_are_ordered_and_numbered(client: aiohttp.ClientSession) -> None:
    async with client.post(PATH, json={"input": "sea", "max_output_tokens": 2, "stream": True}) as response:
        lines = (await response.text()).splitlines()
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [orjson.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    assert [name.removeprefix("response.") for name in names] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[-1]["response"]["status"] == "incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_response_is_known_only_to_its_pod(client: aiohttp.ClientSession) -> None:
    first = await post(client, PATH, input="x")
    async with SimPod() as other, aiohttp.ClientSession(other.url) as elsewhere:
        status, body = await refusal(elsewhere, PATH, input="y", previous_response_id=first["id"])
        assert (status, body["error"]["message"]) == (404, f"Response with id '{first['id']}' not found.")
        async with elsewhere.get(f"{PATH}/{first['id']}") as response:
            assert response.status == 404


async def test_the_next_turn_has_the_last_one_cached(client: aiohttp.ClientSession) -> None:
    first = await post(client, PATH, input="long " * 100, max_output_tokens=64)
    second = await post(client, PATH, input="more", previous_response_id=first["id"])
    usage = second["usage"]
    assert usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"] < 30


async def test_a_response_with_store_false_is_not_stored(client: aiohttp.ClientSession) -> None:
    first = await post(client, PATH, input="x", store=False)
    assert (await refusal(client, PATH, input="y", previous_response_id=first["id"]))[0] == 404


async def test_a_background_response_continues_after_its_request(pod: SimPod, client: aiohttp.ClientSession) -> None:
    queued = await post(client, PATH, input="x", background=True, max_output_tokens=5)
    assert queued["status"] == "queued"
    await until(lambda: is_idle(pod))
    async with client.get(f"{PATH}/{queued['id']}") as response:
        ended = await response.json()
    assert (ended["status"], ended["usage"]["output_tokens"]) == ("incomplete", 5)


async def test_a_background_response_can_be_cancelled() -> None:
    async with SimPod(SimConfig(time_scale=5)) as pod, aiohttp.ClientSession(pod.url) as client:
        queued = await post(client, PATH, input="x", background=True, max_output_tokens=100_000)
        await until(lambda: len(pod.engine.running) == 1)
        cancelled = await post(client, f"{PATH}/{queued['id']}/cancel")
        assert cancelled["status"] == "cancelled"
        assert not pod.engine.busy
        status, body = await refusal(client, f"{PATH}/{queued['id']}/cancel")
        assert (status, body["error"]["message"]) == (400, "Cannot cancel a synchronous response.")


async def test_instructions_and_items_are_part_of_the_prompt(client: aiohttp.ClientSession) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call_output", "output": "4"},
    ]
    reply = await post(client, PATH, input=items, instructions="be brief")
    rendered = b"<|system|>be brief\n<|user|>hello\n<|tool|>4\n<|assistant|>"
    assert reply["usage"]["input_tokens"] == -(-len(rendered) // 4)
