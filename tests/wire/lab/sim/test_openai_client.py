"""The official client works with a simulated pod as with a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import orjson
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from proxy.lab.sim import SimPod

USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture
async def api(pod: SimPod) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0) as api:
        yield api


async def test_chat(api: AsyncOpenAI) -> None:
    reply = await api.chat.completions.create(model="sim", messages=USER, max_tokens=5)
    assert len((reply.choices[0].message.content or "").split()) == 5
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5


async def test_a_chat_stream_with_its_usage(api: AsyncOpenAI) -> None:
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
    parameters: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    reply = await api.chat.completions.create(
        model="sim",
        messages=USER,
        tools=[{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        tool_choice="required",
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert orjson.loads(call.function.arguments) == {"city": "sim"}


async def test_completions(api: AsyncOpenAI) -> None:
    reply = await api.completions.create(model="sim", prompt="the sea", max_tokens=3)
    assert (reply.choices[0].finish_reason, len(reply.choices[0].text)) == ("length", 12)


async def test_embeddings_are_the_same_in_every_encoding(api: AsyncOpenAI) -> None:
    as_base64 = await api.embeddings.create(model="sim", input=["a", "b"])
    as_float = await api.embeddings.create(model="sim", input=["a", "b"], encoding_format="float")
    for one, other in zip(as_base64.data, as_float.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert as_float.data[0].embedding != as_float.data[1].embedding


async def test_responses_remember_the_turns_before(api: AsyncOpenAI) -> None:
    first = await api.responses.create(model="sim", input="hello " * 50, max_output_tokens=5)
    assert (first.status, len(first.output_text)) == ("incomplete", 20)
    second = await api.responses.create(model="sim", input="more", previous_response_id=first.id)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert (await api.responses.retrieve(first.id)).output_text == first.output_text


async def test_a_stream_of_a_response(api: AsyncOpenAI) -> None:
    whole = await api.responses.create(model="sim", input="the sea", max_output_tokens=5)
    text, last = "", ""
    async for event in await api.responses.create(model="sim", input="the sea", max_output_tokens=5, stream=True):
        last = event.type
        if event.type == "response.output_text.delta":
            text += event.delta
    assert (text, last) == (whole.output_text, "response.completed")


async def test_audio(api: AsyncOpenAI) -> None:
    received = await api.audio.transcriptions.create(model="sim", file=("a.wav", b"\r\n--\0" * 1000))
    assert received.text == "5000 bytes of audio"
    spoken = await api.audio.speech.create(model="sim", input="the sea", voice="none")
    assert spoken.content.startswith(b"RIFF")


async def test_models(api: AsyncOpenAI) -> None:
    assert [model.id async for model in api.models.list()] == ["sim"]


async def test_an_unknown_model_is_a_not_found_error(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await api.chat.completions.create(model="nope", messages=USER)


async def test_a_bad_field_is_a_bad_request_error(api: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at least 1"):
        await api.chat.completions.create(model="sim", messages=USER, max_tokens=-1)
