"""What the engine refuses is refused in its own words.

Clients cannot use paths that control an engine.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fleet import MODEL, Fleet

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]

REFUSED: dict[str, tuple[str, dict[str, Any], int]] = {
    "wrong type of a parameter": (COMPLETIONS, {"prompt": "a", "priority": "high"}, 400),
    "parameter out of range": (CHAT, {"messages": HELLO, "temperature": -2}, 400),
    "stream options without stream": (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, 400),
    "prompt too long": (COMPLETIONS, {"prompt": [5] * 9000}, 400),
    "prompt too long for a stream": (COMPLETIONS, {"prompt": [5] * 9000, "stream": True}, 400),
    "no messages": (CHAT, {"messages": []}, 400),
    "messages with a negative limit": ("/v1/messages", {"messages": HELLO, "max_tokens": -1}, 400),
    "an API that this engine lacks": ("/v1/embeddings", {"input": "a"}, 404),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_error_is_relayed_unchanged(fleet: Fleet, case: str) -> None:
    path, fields, status = REFUSED[case]
    body = {"model": MODEL, **fields}
    response = fleet.http.post(path, body)
    direct = fleet.engine(response.pod).http.post(path, body)
    assert response.status == direct.status == status
    assert response.body == direct.body
    assert response.headers["content-type"] == direct.headers["content-type"]


def test_an_unknown_field_is_left_to_the_engine(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "no_such_field": {"deep": [1]}}
    assert fleet.http.post(COMPLETIONS, body).status == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_parameters_of_a_kv_transfer_do_not_reach_an_engine(fleet: Fleet, path: str) -> None:
    """The engine refuses this one; so a response shows that it was removed."""
    body = {"model": MODEL, "messages": HELLO, "prompt": "a", "max_tokens": 1, "kv_transfer_params": "none at all"}
    assert fleet.engines[0].http.post(path, body).status == 400
    assert fleet.http.post(path, body).status == 200
    harmful = {**body, "kv_transfer_params": {"do_remote_prefill": True}}
    assert fleet.http.post(path, harmful).status == 200
    assert all(engine.http.up() for engine in fleet.engines)


@pytest.mark.parametrize("path", ["/metrics", "/v1/load_lora_adapter", "/server_info", "/load"])
def test_control_paths_of_an_engine_are_not_relayed(fleet: Fleet, path: str) -> None:
    for response in (fleet.http.get(path), fleet.http.post(path, {"lora_name": "a", "lora_path": "b"})):
        assert response.status == 404
        assert response.headers["x-kvlane-reason"] == "unknown-path"


def test_an_unknown_model_is_404(fleet: Fleet) -> None:
    response = fleet.http.post(CHAT, {"model": "nobody", "messages": HELLO})
    assert (response.status, response.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'"text"'], ids=["cut", "list", "empty", "string"])
def test_a_body_that_is_not_an_object_is_400(fleet: Fleet, body: Any) -> None:
    response = fleet.http.post(CHAT, body)
    assert (response.status, response.json["error"]["type"]) == (400, "invalid_request_error")
