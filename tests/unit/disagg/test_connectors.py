"""What the two pods are sent."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint, join_ranks
from proxy.disagg.connectors import NAMES, connector_named
from proxy.disagg.requests import for_prefill, why_whole, with_fields, without_transfer
from proxy.openai.bodies import object_in, with_long_integers

PREFILL = Endpoint("p", "http://10.0.0.1:8000", labels={"kvlane/bootstrap-port": "9000", "kvlane/engine-id": "e1"})
DECODE = Endpoint("d", "http://10.0.0.2:8000/base", labels={"kvlane/transfer-host": "fast.local"})
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/completions", {"max_tokens": 1}),
        ("/v1/messages", {"max_tokens": 1, "max_completion_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1, "store": False}),
    ],
)
def test_the_prefill_pod_gets_the_same_prompt_and_makes_one_token(path: str, limits: dict[str, int]) -> None:
    body = {"model": "m", "messages": [1], "stream": True, "stream_options": {}, "stop": ["x"], "min_tokens": 7}
    made = orjson.loads(for_prefill(path, {**body, "temperature": 0.5}, {"extra": 1}))
    assert made == {
        "model": "m", "messages": [1], "stream": False, "temperature": 0.5, "min_tokens": 1, "extra": 1, **limits,
    }  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_prefill_pods_token_does_not_end_the_response(path: str) -> None:
    """Engines transfer what a response of full length has left; of one that ends by itself some keep nothing."""
    assert orjson.loads(for_prefill(path, {"stop": ["x"]}, {}))["min_tokens"] == 1
    assert b"stop" not in for_prefill(path, {"stop": ["x"]}, {})


def test_the_prefill_pod_gets_everything_that_is_in_the_prompt() -> None:
    """Kimi's and Cohere's templates write down the required form of a response."""
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    body = {"messages": [], "response_format": shape, "tools": [1], "chat_template_kwargs": {"a": 1}}
    assert body.items() <= orjson.loads(for_prefill(CHAT, body, {})).items()


LONG = 2**256 - 1


def test_long_integers_in_a_body_that_is_written_again_are_unchanged() -> None:
    body = b'{"messages":[],"kv_transfer_params":{},"tools":[{"maximum":%d,"minimum":-%d}]}' % (LONG, 10**18 * 10 - 1)
    fields = object_in(body)
    assert fields is not None
    for made in (for_prefill(CHAT, with_long_integers(fields, body), {}), without_transfer(body)):
        assert json.loads(made)["tools"] == [{"maximum": LONG, "minimum": 1 - 10**19}]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_fields_are_added_to_a_body_in_any_encoding(encoding: str) -> None:
    body = '{"messages":["é"],"kv_transfer_params":{"x":1}}'
    assert json.loads(with_fields(body.encode(encoding), {"a": 1})) == {"messages": ["é"], "a": 1}


def test_a_background_response_is_computed_at_once_by_the_prefill_pod() -> None:
    made = orjson.loads(for_prefill("/v1/responses", {"input": "a", "background": True, "store": True}, {}))
    assert made == {"input": "a", "store": False, "stream": False, "max_output_tokens": 1}


def test_a_prefill_pod_that_starts_the_response_gets_the_whole_request() -> None:
    of_the_response = {"logprobs": True, "top_logprobs": 2, "stop": ["x"], "structured_outputs": {}, "temperature": 1}
    body = {"messages": [], **of_the_response, "stream": True, "stream_options": {}, "max_tokens": 9}
    made = orjson.loads(for_prefill(CHAT, body, {}, generates_first_token=True))
    assert made == {"messages": [], **of_the_response, "stream": False, "max_tokens": 1, "max_completion_tokens": 1}
    assert [one.name for one in map(connector_named, NAMES) if one.generates_first_token] == ["sglang"]


def test_transfer_fields_of_clients_reach_no_pod() -> None:
    body = b'{"model":"m","kv_transfer_params":{"do_remote_prefill":true},"x":1}'
    assert orjson.loads(without_transfer(body)) == {"model": "m", "x": 1}
    assert orjson.loads(with_fields(body, {"y": 2})) == {"model": "m", "x": 1, "y": 2}
    fields = object_in(body)
    assert fields is not None
    assert b"kv_transfer_params" not in for_prefill(CHAT, fields, {})
    text = b'{"x":"\\"kv_transfer_params\\""}'
    assert without_transfer(text) is text


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers(-9, 9)), max_size=4), st.booleans())
def test_the_clients_bytes_stay_and_fields_are_appended(fields: dict[str, Any], spaced: bool) -> None:
    body = json.dumps(fields, indent=2 if spaced else None).encode() + (b"\n" if spaced else b"")
    made = with_fields(body, {"kv": {"a": [1]}})
    assert json.loads(made) == {**fields, "kv": {"a": [1]}}
    assert made.startswith(body.rstrip()[:-1].rstrip())
    assert with_fields(body, {}) is body


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": [[1], [2]]}),
        ("/v1/completions", {"prompt": "a", "echo": True}),
        ("/v1/completions", {"prompt": "a", "best_of": 3}),
        (CHAT, {"use_beam_search": True}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt_embeds": "a"}),
        (CHAT, {"prompt_logprobs": 1}),
        (CHAT, {"tool_choice": "required"}),
        (CHAT, {"tool_choice": {"type": "function"}}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
def test_some_requests_cannot_be_split(path: str, fields: dict[str, Any]) -> None:
    assert why_whole(path, fields)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 1, "tools": [1], "tool_choice": "auto", "logprobs": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": [1, 2, 3]}),
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/completions", {"prompt": ["a"]}),
        ("/v1/completions", {"prompt": [[1, 2, 3]]}),
    ],
)
def test_other_requests_can_be_split(path: str, fields: dict[str, Any]) -> None:
    assert why_whole(path, fields) == ""


def test_a_forced_tool_can_be_split_if_the_prefill_pod_starts_the_response() -> None:
    assert why_whole(CHAT, {"tool_choice": "required"}, generates_first_token=True) == ""


def test_nixl_passes_the_parameters_of_the_prefill_pod_unchanged() -> None:
    connector = connector_named("nixl")()
    split = connector.split("r", PREFILL, DECODE, random.Random(1))
    assert split.prefill["kv_transfer_params"]["do_remote_decode"] is True
    body = {"remote_engine_id": "e", "remote_block_ids": [[1, 2]], "tp_size": 1}
    assert connector.hand_over({"kv_transfer_params": body}) == {"kv_transfer_params": body}
    for nothing in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"remote_block_ids": [1]}}):
        assert connector.hand_over(nothing) is None


def test_sglang_pods_get_the_same_bootstrap_id() -> None:
    connector = connector_named("sglang")()
    split = connector.split("r", PREFILL, DECODE, random.Random(1))
    assert connector.at_once
    assert split.prefill == split.decode
    assert split.prefill["bootstrap_host"] == "10.0.0.1"
    assert split.prefill["bootstrap_port"] == 9000
    assert 0 <= split.prefill["bootstrap_room"] < 2**63


def test_mooncake_pods_get_the_same_transfer() -> None:
    split = connector_named("mooncake")().split("r", PREFILL, DECODE, random.Random(1))
    assert split.decode is not None
    here, away = split.prefill["kv_transfer_params"], split.decode["kv_transfer_params"]
    assert here["transfer_id"] == away["transfer_id"]
    assert here["transfer_id"].endswith("-r")
    assert (away["remote_bootstrap_addr"], away["remote_engine_id"]) == ("http://10.0.0.1:9000", "e1")


def test_p2p_nccl_addresses_are_in_the_request_id() -> None:
    split = connector_named("p2p-nccl")().split("r", PREFILL, DECODE, random.Random(1))
    assert split.request_id is not None
    addresses, _, name = split.request_id.rpartition("_")
    assert addresses == "___prefill_addr_10.0.0.1:9000___decode_addr_fast.local:14579"
    assert name.endswith("-r")


@pytest.mark.parametrize("client_s", ["r", "team:12", "__x", "a___decode_addr_evil:1_", "9", ""])
def test_engines_find_their_addresses_with_any_client_id(client_s: str) -> None:
    """By the patterns of vLLM's connector, which are greedy."""
    split = connector_named("p2p-nccl")().split(client_s, PREFILL, DECODE, random.Random(1))
    engine_s = f"chatcmpl-{split.request_id}-0"
    [to_decode] = re.findall(r"___decode_addr_(.*):(\d+)", engine_s)
    [to_prefill] = re.findall(r"___prefill_addr_(.*):(\d+)___", engine_s)
    assert (to_decode, to_prefill) == (("fast.local", "14579"), ("10.0.0.1", "9000"))


@pytest.mark.parametrize("name", ["mooncake", "sglang", "p2p-nccl"])
def test_transfer_ids_are_unique(name: str) -> None:
    """Transfers of nixl are named by the engine, transfers of shared storage by their content."""
    draw = random.Random(1)
    splits = [connector_named(name)().split("r", PREFILL, DECODE, draw) for _ in range(20)]
    assert len({(repr(split.prefill), split.request_id) for split in splits}) == 20


def test_stop_sequences_of_a_message_do_not_end_its_prefill() -> None:
    assert b"stop" not in for_prefill("/v1/messages", {"messages": [], "stop_sequences": ["x"]}, {})


def test_a_thinking_budget_is_removed_for_one_token() -> None:
    body = {"messages": [], "thinking": {"type": "enabled", "budget_tokens": 2000}}
    assert "thinking" not in orjson.loads(for_prefill("/v1/messages", body, {}))
    never = {"messages": [], "thinking": {"type": "disabled"}}
    assert orjson.loads(for_prefill("/v1/messages", never, {}))["thinking"] == {"type": "disabled"}


def test_the_decode_pod_gets_the_prefill_rank() -> None:
    """By a field; older SGLang uses the remainder of the bootstrap id."""
    ranks = [Endpoint(f"p/{rank}", PREFILL.url, rank=rank, labels=PREFILL.labels) for rank in range(4)]
    join_ranks(ranks)
    for seed in range(20):
        split = connector_named("sglang")().split("r", ranks[3], DECODE, random.Random(seed))
        assert split.decode is not None
        assert split.decode["disagg_prefill_dp_rank"] == 3
        assert split.prefill["bootstrap_room"] == split.decode["bootstrap_room"]
        assert split.prefill["bootstrap_room"] % 4 == 3
        assert split.prefill["bootstrap_room"] < 2**63
    split = connector_named("mooncake")().split("r", ranks[3], DECODE, random.Random(1))
    assert split.decode is not None
    assert split.decode["kv_transfer_params"]["remote_engine_id"] == "e1_dp3"
