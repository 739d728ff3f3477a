"""Every API of the engine works through the proxy."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fleet import ADAPTER, MODEL, Fleet

pytestmark = pytest.mark.vllm

HELLO = [{"role": "user", "content": "Hello"}]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}


def without(response: Any, *volatile: str) -> Any:
    """Without what differs between two equal requests."""
    return {key: value for key, value in response.items() if key not in ("id", "created", *volatile)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", body_of(messages=HELLO)),
        ("/v1/completions", body_of(prompt="Hello world")),
        ("/v1/completions", body_of(prompt=[1000, 1001, 1002])),
        ("/v1/completions", body_of(prompt=["one", "two"], n=2, temperature=0.5, seed=7)),
        ("/v1/messages", body_of(messages=HELLO)),
    ],
    ids=["chat", "completion", "token ids", "batch", "messages"],
)
def test_a_response_equals_that_of_the_engine(fleet: Fleet, path: str, body: Any) -> None:
    response = fleet.http.post(path, body)
    direct = fleet.engine(response.pod).http.post(path, body)
    assert response.status == 200
    assert without(response.json) == without(direct.json)


def test_a_request_without_a_model_gets_the_base_model(fleet: Fleet) -> None:
    response = fleet.http.post("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
    assert (response.status, response.json["model"]) == (200, MODEL)


def test_tokenize_and_detokenize_are_inverse(fleet: Fleet) -> None:
    tokens = fleet.http.post("/tokenize", {"model": MODEL, "prompt": "Hello world, how are you?"}).json
    assert tokens["count"] == len(tokens["tokens"]) > 0
    text = fleet.http.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]}).json
    assert text == {"prompt": "Hello world, how are you?"}


def test_tokens_of_messages_are_counted(fleet: Fleet) -> None:
    assert fleet.http.post("/v1/messages/count_tokens", body_of(messages=HELLO)).json["input_tokens"] > 0


def test_the_models_of_all_pods_are_listed_once(fleet: Fleet) -> None:
    """Fields that only vLLM has are kept."""
    cards = {card["id"]: card for card in fleet.http.get("/v1/models").json["data"]}
    assert set(cards) == {MODEL, ADAPTER}
    assert cards[MODEL]["max_model_len"] == 8192
    assert cards[ADAPTER]["parent"] == MODEL


def test_requests_for_a_lora_adapter_go_to_pods_that_loaded_it(fleet: Fleet, record_property: Any) -> None:
    pods = [fleet.http.post("/v1/completions", body_of(model=ADAPTER, prompt=f"{n}")).pod for n in range(6)]
    assert pods == [fleet.adapted.name] * 6
    record_property("requests", len(pods))
    record_property("pods that responded", len(set(pods)))


def test_a_stored_response_is_found_and_continued_on_its_pod(fresh: Fleet, record_property: Any) -> None:
    """Six chains, so that they are on both pods: any other pod responds 404."""
    used = set()
    for number in range(6):
        first = respond(fresh, f"Chain {number}")
        stored = fresh.http.get(f"/v1/responses/{first.json['id']}")
        second = respond(fresh, "More", previous_response_id=first.json["id"])
        assert (first.status, stored.status, second.status) == (200, 200, 200), second.body
        assert stored.json["output"] == first.json["output"]
        assert second.json["previous_response_id"] == first.json["id"]
        assert first.pod == stored.pod == second.pod
        used.add(first.pod)
    assert len(used) == 2
    record_property("chains", 6)
    record_property("pods", len(used))


def test_an_unknown_response_is_404(fleet: Fleet) -> None:
    assert fleet.http.get("/v1/responses/resp_nobody").status == 404
    assert respond(fleet, "More", previous_response_id="resp_nobody").status == 404


def respond(fleet: Fleet, text: str, **fields: Any) -> Any:
    body = {"model": MODEL, "input": text, "max_output_tokens": 4, "temperature": 0, "store": True, **fields}
    return fleet.http.post("/v1/responses", body)
