"""Every refusal in the words of the real engine (vLLM 0.32)."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from proxy.lab.sim import Fault, FaultKind, SimConfig, SimPod
from tests.helpers.lab.sim.support import CHAT, USER, post, refusal

COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}
UNKNOWN = "The model `nope` does not exist. Valid aliases: sim."


def error(message: str, type: str, param: str | None, code: int = 400) -> tuple[int, Any]:
    return code, {"error": {"message": message, "type": type, "param": param, "code": code}}


@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (
            b'{"model":"tiny","prompt":',
            "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.25', 'msg': 'JSON decode error', "
            "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
            "body.25",
        ),
        (
            b"[]",
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid "
            "dictionary or object to extract fields from', 'input': '<list of 0 items>'}",
            "body",
        ),
        (
            b"",
            "1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}",
            "body",
        ),
    ],
)
async def test_a_body_that_is_not_an_object_is_refused(
    client: aiohttp.ClientSession, raw: bytes, message: str, param: str
) -> None:
    async with client.post(COMPLETIONS, data=raw, headers=JSON) as response:
        found = response.status, orjson.loads(await response.read())
    assert found == error(message, "Bad Request", param)


async def test_only_json_is_allowed(client: aiohttp.ClientSession) -> None:
    async with client.post(COMPLETIONS, data=b"{}", headers={"Content-Type": "text/plain"}) as response:
        found = response.status, orjson.loads(await response.read())
    message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    assert found == error(message, "Bad Request", None)


async def test_a_charset_does_not_matter(client: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    async with client.post(COMPLETIONS, data=b'{"prompt": "x"}', headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"}), ("/v1/responses", {"input": "x"})],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_not_found(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any], stream: bool
) -> None:
    found = await refusal(client, path, model="nope", stream=stream, **body)
    assert found == error(UNKNOWN, "NotFoundError", "model", 404)


async def test_messages_errors_have_the_shape_of_anthropic(client: aiohttp.ClientSession) -> None:
    found = await refusal(client, "/v1/messages", model="nope", max_tokens=1, messages=USER)
    assert found == (404, {"type": "error", "error": {"type": "NotFoundError", "message": UNKNOWN}})


async def test_a_missing_field_of_messages_has_the_shape_of_openai(client: aiohttp.ClientSession) -> None:
    status, body = await refusal(client, "/v1/messages", max_tokens=1)
    assert (status, body["error"]["param"]) == (400, "body.messages")


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (
            CHAT,
            {"model": "sim"},
            error(
                "1 validation error:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
                "'input': '<dict of 1 items>'}",
                "Bad Request",
                "body.messages",
            ),
        ),
        (
            CHAT,
            {"messages": "x"},
            error(
                "1 validation error:\n  {'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid "
                "list', 'input': 'x'}",
                "Bad Request",
                "body.messages",
            ),
        ),
        (
            CHAT,
            {"messages": []},
            error(
                "Cannot apply chat template to an empty conversation. Provide at least one message.",
                "BadRequestError",
                None,
            ),
        ),
        (
            CHAT,
            {"messages": USER, "stream_options": {"include_usage": True}},
            error(
                "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
                "BadRequestError",
                "stream_options",
            ),
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "max_tokens": -1},
            error(
                "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)",
                "BadRequestError",
                "max_tokens",
            ),
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "temperature": -2},
            error(
                "temperature must be non-negative, got -2.0. (parameter=temperature, value=-2.0)",
                "BadRequestError",
                "temperature",
            ),
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "priority": "x"},
            error(
                "1 validation error:\n  {'type': 'int_parsing', 'loc': 'body.priority', 'msg': 'Input should be a "
                "valid integer, unable to parse string as an integer', 'input': 'x'}",
                "Bad Request",
                "body.priority",
            ),
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "cache_salt": ""},
            error(
                "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
                "BadRequestError",
                "cache_salt",
            ),
        ),
        (COMPLETIONS, {"prompt": [-1]}, error("Token id -1 is out of vocabulary", "BadRequestError", None)),
    ],
)
async def test_a_bad_field_is_refused(
    client: aiohttp.ClientSession, path: str, body: dict[str, Any], expected: tuple[int, Any]
) -> None:
    assert await refusal(client, path, **body) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_refused(stream: bool) -> None:
    async with SimPod(SimConfig(max_model_len=100)) as pod, aiohttp.ClientSession(pod.url) as client:
        status, body = await refusal(client, COMPLETIONS, prompt=[5] * 150, stream=stream)
    assert (status, body["error"]["param"]) == (400, "input_tokens")
    assert body["error"]["message"].startswith(
        "This model's maximum context length is 100 tokens. However, your prompt contains 150 input tokens, which"
    )


async def test_an_unknown_path_is_not_found_and_logged(pod: SimPod, client: aiohttp.ClientSession) -> None:
    assert await refusal(client, "/v1/nothing") == (404, {"detail": "Not Found"})
    assert [(record.path, record.status) for record in pod.requests] == [("/v1/nothing", 404)]


async def test_an_unknown_method_is_not_allowed(client: aiohttp.ClientSession) -> None:
    async with client.get(CHAT) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert await response.json() == {"detail": "Method Not Allowed"}


async def test_a_full_queue_refuses(pod: SimPod, client: aiohttp.ClientSession) -> None:
    pod.faults.set([Fault(FaultKind.ERROR_FIRST)])
    status, body = await refusal(client, COMPLETIONS, prompt="y")
    assert (status, body["error"]["type"]) == (503, "Service Unavailable")
    status, body = await refusal(client, "/v1/messages", max_tokens=1, messages=USER)
    assert (status, body["error"]["type"], body["type"]) == (503, "Service Unavailable", "error")


async def test_unknown_fields_and_a_missing_model_are_accepted(client: aiohttp.ClientSession) -> None:
    assert (await post(client, COMPLETIONS, prompt="a", unknown_field=1))["model"] == "sim"
