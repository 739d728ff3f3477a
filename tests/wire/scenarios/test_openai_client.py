"""The official client before the proxy: its errors, its results, and the pod that it reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from proxy.lab.sim import SimConfig, StepTiming
from tests.helpers.scenarios.stack import BLIND, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(timing=StepTiming(base=0.02, per_prefill_token=0.0))
USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@asynccontextmanager
async def client(
    pods: int = 2, config: SimConfig | None = None, settings: Mapping[str, Any] | None = None
) -> AsyncIterator[tuple[Stack, Any]]:
    async with (
        stack(pods, config, settings) as s,
        AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0) as api,
    ):
        yield s, api


@pytest.fixture
async def api() -> AsyncIterator[AsyncOpenAI]:
    async with client() as (_, api):
        yield api


async def test_chat(api: AsyncOpenAI) -> None:
    response = await api.chat.completions.create(model="sim", messages=USER, max_tokens=5)
    assert len((response.choices[0].message.content or "").split()) == 5
    assert response.usage is not None
    assert response.usage.completion_tokens == 5


async def test_a_stream_has_the_text_of_the_complete_response_and_its_usage_last(api: AsyncOpenAI) -> None:
    whole = await api.chat.completions.create(model="sim", messages=USER, max_tokens=5)
    text, usages = "", []
    async for chunk in await api.chat.completions.create(
        model="sim", messages=USER, max_tokens=5, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usages.append(chunk.usage)
    assert text == whole.choices[0].message.content
    assert usages[-1] is not None
    assert usages[:-1] == [None] * (len(usages) - 1)


async def test_a_tool_call(api: AsyncOpenAI) -> None:
    response = await api.chat.completions.create(model="sim", messages=USER, tools=[WEATHER], tool_choice="required")
    (call,) = response.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert orjson.loads(call.function.arguments) == {"city": "sim"}


async def test_a_streamed_tool_call(api: AsyncOpenAI) -> None:
    name, arguments = "", ""
    async for chunk in await api.chat.completions.create(
        model="sim", messages=USER, tools=[WEATHER], tool_choice="required", stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, orjson.loads(arguments)) == ("weather", {"city": "sim"})


async def test_completions_of_text_of_tokens_and_of_batches(api: AsyncOpenAI) -> None:
    prompts: list[Any] = ["the sea", [1, 2, 3], ["one", "two"], [[1, 2], [3, 4]]]
    choices = [len((await api.completions.create(model="sim", prompt=prompt)).choices) for prompt in prompts]
    assert choices == [1, 1, 2, 2]


async def test_embeddings_are_the_same_in_every_encoding(api: AsyncOpenAI) -> None:
    as_base64 = await api.embeddings.create(model="sim", input=["a", "b"])
    as_float = await api.embeddings.create(model="sim", input=["a", "b"], encoding_format="float")
    for one, other in zip(as_base64.data, as_float.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)


async def test_audio_both_ways(api: AsyncOpenAI) -> None:
    received = await api.audio.transcriptions.create(model="sim", file=("a.wav", b"\r\n--\0" * 1000))
    assert received.text == "5000 bytes of audio"
    spoken = await api.audio.speech.create(model="sim", input="the sea", voice="none")
    assert spoken.content == b"RIFF" + b"the sea" * 160


async def test_models_are_listed_and_found_by_name(api: AsyncOpenAI) -> None:
    assert [model.id async for model in api.models.list()] == ["sim"]
    assert (await api.models.retrieve("sim")).owned_by == "vllm"
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("nope")


async def test_a_response_is_found_again_on_its_own_pod() -> None:
    async with client(pods=4, settings=BLIND) as (s, api):
        made = [await api.responses.create(model="sim", input=f"question {number}") for number in range(8)]
        assert len([pod for pod in s.pods if len(pod.requests)]) == 4
        for response in made:
            assert (await api.responses.retrieve(response.id)).output_text == response.output_text


async def test_a_conversation_continues_on_its_pod() -> None:
    async with client(pods=4, settings=BLIND) as (s, api):
        for number in range(4):
            first = await api.responses.create(model="sim", input=f"{number} hello " * 50, max_output_tokens=5)
            second = await api.responses.create(model="sim", input="more", previous_response_id=first.id)
            third = await api.responses.create(model="sim", input="and more", previous_response_id=second.id)
            assert first.usage.input_tokens < second.usage.input_tokens < third.usage.input_tokens
        assert sorted(len(pod.requests) for pod in s.pods) == [3, 3, 3, 3]


async def test_a_streamed_response_is_bound_to_its_pod() -> None:
    async with client(pods=4) as (_, api):
        text, events = "", []
        async for event in await api.responses.create(model="sim", input="the sea", stream=True):
            events.append(event)
            text += event.delta if event.type == "response.output_text.delta" else ""
        assert events[-1].type == "response.completed"
        assert (await api.responses.retrieve(events[0].response.id)).output_text == text


async def test_a_background_response_is_cancelled_on_its_pod() -> None:
    async with client(pods=4, config=SLOW) as (s, api):
        response = await api.responses.create(model="sim", input="a long story", background=True, max_output_tokens=900)
        await api.responses.cancel(response.id)
        await until(lambda: not any(pod.engine.busy for pod in s.pods))
        assert (await api.responses.retrieve(response.id)).status == "cancelled"


async def test_a_streamed_response_is_bound_to_its_pod_from_its_first_event() -> None:
    async with client(pods=4, config=SLOW) as (s, api):
        stream = await api.responses.create(model="sim", input="a long story", stream=True, max_output_tokens=900)
        first = await anext(aiter(stream))
        assert first.type == "response.created"
        assert (await api.responses.retrieve(first.response.id)).status == "in_progress"
        assert any(pod.engine.busy for pod in s.pods)
        await stream.close()


async def test_an_unknown_response_is_not_found() -> None:
    async with client(pods=4) as (s, api):
        with pytest.raises(openai.NotFoundError, match="resp_none"):
            await api.responses.retrieve("resp_none")
        with pytest.raises(openai.NotFoundError, match="resp_none"):
            await api.responses.create(model="sim", input="more", previous_response_id="resp_none")
        assert not any(len(pod.requests) for pod in s.pods)


async def test_an_unknown_model_is_a_not_found_error(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await api.chat.completions.create(model="nope", messages=USER)
    assert caught.value.code == "model_not_found"


async def test_a_field_refused_by_the_pod_is_a_bad_request_error(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        await api.chat.completions.create(model="sim", messages=USER, max_tokens=-1)


async def test_a_body_refused_by_the_proxy_is_a_bad_request_error(api: AsyncOpenAI) -> None:
    messages: Any = {"role": "user"}
    with pytest.raises(openai.BadRequestError) as caught:
        await api.chat.completions.create(model="sim", messages=messages)
    assert caught.value.param == "messages"


async def test_a_body_over_the_limit_is_an_error_of_status_413() -> None:
    async with client(settings={"listen": {"maxBody": "64KiB"}}) as (s, api):
        with pytest.raises(openai.APIStatusError) as caught:
            await api.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x" * 100_000}])
        assert caught.value.status_code == 413
        assert caught.value.code == "body_too_large"
        assert not any(len(pod.requests) for pod in s.pods)


async def test_a_broken_stream_raises() -> None:
    async with client(pods=1, config=SLOW) as (s, api):
        stream = await api.chat.completions.create(model="sim", messages=USER, max_tokens=2000, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        await s.pods[0].kill()
        with pytest.raises(openai.APIError, match="incomplete"):
            await drained(stream)
        await s.idle()


async def drained(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


async def test_a_stream_that_is_closed_early_is_aborted_on_the_pod() -> None:
    async with client(pods=2, config=SLOW) as (s, api):
        stream = await api.chat.completions.create(model="sim", messages=USER, max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: any(record.aborted for pod in s.pods for record in pod.requests))
        await s.idle()


async def test_without_a_pod_it_is_an_internal_server_error_and_the_client_may_retry() -> None:
    async with client(pods=1) as (s, api):
        await s.pods[0].kill()
        await until(lambda: not s.app.fleet.ready)
        with pytest.raises(openai.InternalServerError) as caught:
            await api.chat.completions.create(model="sim", messages=USER)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        await s.pods[0].start(port=s.pods[0].port)
        await until(lambda: bool(s.app.fleet.ready))
        assert (await api.chat.completions.create(model="sim", messages=USER)).choices
