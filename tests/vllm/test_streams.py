"""Streams arrive byte for byte.

Whatever the engine sends for a request is what the client gets for it: both sides of the proxy are listened to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import EngineResponse
from tests.vllm.fleet import MODEL, Fleet, proxy, wait_until_equal
from tests.vllm.tap import Tap

pytestmark = pytest.mark.vllm

HELLO = [{"role": "user", "content": "Hello there"}]
LIMIT = {"max_tokens": 48, "ignore_eos": True}
WITH_USAGE = {"stream_options": {"include_usage": True}}

STREAMS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, **LIMIT}, b"data: [DONE]\n\n"),
    "chat with usage": ("/v1/chat/completions", {"messages": HELLO, **LIMIT, **WITH_USAGE}, b"data: [DONE]\n\n"),
    "completion": ("/v1/completions", {"prompt": "Hello", **LIMIT, **WITH_USAGE}, b"data: [DONE]\n\n"),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 48}, b'"type":"response.completed"}\n\n'),
    "messages": ("/v1/messages", {"messages": HELLO, **LIMIT}, b'{"type":"message_stop"}\n\n'),
}

OURS = ("x-request-id", "x-kvlane-endpoint")
"""The headers that the proxy adds."""


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_is_relayed_byte_for_byte(fleet: Fleet, tmp_path: Path, case: str, record_property: Any) -> None:
    path, fields, end = STREAMS[case]
    with Tap(fleet.engines[0].http.host) as tap, proxy([tap.url], tmp_path / "proxy.log") as tapped:
        response = tapped.http.post(path, {"model": MODEL, "stream": True, **fields})
    sent = tap.response_to("POST")
    assert sent.status == response.status == 200
    assert response.body == sent.body
    assert response.body.endswith(end)
    assert {name: value for name, value in response.headers.items() if name not in OURS} == sent.headers
    record_property("bytes", len(response.body))
    record_property("events", response.body.count(b"\n\n"))


def test_a_stream_equals_that_of_the_engine(fleet: Fleet) -> None:
    """At temperature 0; events may differ, since an engine under pressure puts two tokens into one."""
    body = {"model": MODEL, "messages": HELLO, "stream": True, "temperature": 0, **LIMIT}
    response = fleet.http.post("/v1/chat/completions", body)
    direct = fleet.engine(response.pod).http.post("/v1/chat/completions", body)
    assert text_of(response) == text_of(direct) != ""


def test_usage_comes_last_and_only_on_request(fleet: Fleet) -> None:
    chat = {"model": MODEL, "messages": HELLO, "stream": True, **LIMIT}
    without = events(fleet.http.post("/v1/chat/completions", chat))
    assert not any(event.get("usage") for event in without)
    *others, last = events(fleet.http.post("/v1/chat/completions", {**chat, **WITH_USAGE}))
    assert not any(event.get("usage") for event in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == LIMIT["max_tokens"]


def test_the_request_id_of_the_client_reaches_the_engine(fleet: Fleet) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    response = fleet.http.post("/v1/chat/completions", body, {"X-Request-Id": "of-the-client"})
    assert response.headers["x-request-id"] == "of-the-client"
    assert response.json["id"] == "chatcmpl-of-the-client"


def test_a_stream_arrives_while_it_is_generated(fleet: Fleet, record_property: Any) -> None:
    """The first bytes are there while the engine still works on the rest."""
    body = {"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": 8000, "ignore_eos": True}
    with fleet.http.pending("/v1/completions", body) as stream:
        assert stream.read(6) == b"data: "
        wait_until_equal(fleet.busy, 1)
    record_property("tokens of the response", 8000)


def text_of(response: EngineResponse) -> str:
    return "".join(event["choices"][0]["delta"]["content"] for event in events(response))


def events(response: EngineResponse) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
