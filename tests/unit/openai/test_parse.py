import gzip
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.errors import BadRequest, InvalidJson
from proxy.core.request import Prompt
from proxy.openai.parse import ENGINE_INTERNALS, Parsed, parse

CHAT = "/v1/chat/completions"


def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def chat(*messages: object, **fields: object) -> Parsed:
    return parse(CHAT, body(model="m", messages=list(messages), **fields))


def prompt_of(*messages: object, **fields: object) -> bytes:
    return chat(*messages, **fields).prompt.parts[0]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (gzip.compress(b"{}", mtime=0), r"compressed \(gzip\)"),
        (b"\x28\xb5\x2f\xfd\x04\x00", r"compressed \(zstd\)"),
        (b'{"model":"\xff"}', "not UTF-8"),
    ],
)
def test_an_invalid_text_is_refused(sent: bytes, message: str) -> None:
    with pytest.raises(InvalidJson, match=message):
        parse(CHAT, sent)


USER = {"role": "user", "content": "hello"}


def test_the_pod_gets_the_clients_bytes() -> None:
    raw = b'{ "model" : "m",\n "messages":[],  "temperature": 1.0e0 }'
    assert parse(CHAT, raw).body is raw


def test_a_chat_request_is_read() -> None:
    parsed = chat(USER, stream=True, max_tokens=7, cache_salt="s")
    assert (parsed.model, parsed.stream, parsed.max_tokens, parsed.prompt.salt) == ("m", True, 7, "s")


def test_an_omitted_and_an_empty_model_are_none() -> None:
    assert parse(CHAT, body(messages=[])).model is None
    assert parse(CHAT, body(model="", messages=[])).model is None
    assert parse(CHAT, body(model=" ", messages=[])).model == " "


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b'{"a":1}}', b"nope"])
def test_what_is_not_json_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidJson):
        parse(CHAT, raw)


@pytest.mark.parametrize("raw", [b"[1]", b'"x"', b"1", b"null", b"true"])
def test_what_is_not_an_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="must be a JSON object"):
        parse(CHAT, raw)


def nested(depth: int) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":' + b"[" * depth + b"]" * depth + b"}]}"


@pytest.mark.parametrize("depth", [300, 1500, 5000])
def test_deep_nesting_is_refused(depth: int) -> None:
    """How deep Python's parser goes differs from version to version."""
    with suppress(BadRequest):
        assert parse(CHAT, nested(depth)).body == nested(depth)


def test_endless_nesting_is_refused() -> None:
    with pytest.raises(BadRequest, match="nested too deeply"):
        parse(CHAT, nested(1_000_000))


def test_json_accepted_by_engines_is_accepted() -> None:
    raw = (
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}],"temperature":NaN,"seed":99999999999999999999}'
    )
    assert parse(CHAT, raw).body is raw


@pytest.mark.parametrize(
    "fields",
    [
        {"model": 1, "messages": []},
        {"model": "m", "messages": "hello"},
        {"model": "m", "messages": [1]},
        {"model": "m", "messages": {}},
        {"model": "m"},
    ],
)
def test_wrong_types_are_refused_with_their_field(fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(CHAT, body(**fields))
    assert refused.value.param


@pytest.mark.parametrize(
    ("value", "stream"),
    [
        (1, True),
        (1.0, True),
        ("true", True),
        ("YES", True),
        ("on", True),
        (0, False),
        ("false", False),
        ("0", False),
        (None, False),
        ("maybe", False),
        (2, False),
        ([], False),
    ],
)
def test_stream_is_read_like_engines_and_sent_unchanged(value: object, stream: bool) -> None:
    raw = body(model="m", messages=[USER], stream=value)
    parsed = parse(CHAT, raw)
    assert parsed.stream is stream
    assert parsed.body is raw


@pytest.mark.parametrize(
    ("value", "limit"),
    [(5, 5), ("5", 5), (5.0, 5), (" 5.0 ", 5), (True, 1), (5.5, 0), ("five", 0), (-1, 0), ("9" * 5000, 0), (1e300, 0)],
)
def test_max_tokens_is_read_like_engines_and_sent_unchanged(value: object, limit: int) -> None:
    raw = body(model="m", messages=[USER], max_tokens=value)
    parsed = parse(CHAT, raw)
    assert parsed.max_tokens == limit
    assert parsed.body is raw


def test_an_empty_model_is_no_name() -> None:
    raw = body(model="", messages=[USER])
    assert parse(CHAT, raw).model is None
    assert parse(CHAT, raw).body is raw


@pytest.mark.parametrize("name", sorted(ENGINE_INTERNALS))
def test_a_client_cannot_steer_engine_internals(name: str) -> None:
    parsed = parse(CHAT, body(model="m", messages=[USER], seed=2**70, **{name: {"remote_host": "x"}}))
    assert json.loads(parsed.body) == {"model": "m", "messages": [USER], "seed": 2**70}


def test_internal_fields_are_removed_from_a_body_with_a_huge_integer() -> None:
    raw = b'{"model":"m","messages":[],"kv_transfer_params":{},"n":%b}' % (b"9" * 5000)
    assert parse(CHAT, raw).body == b'{"model":"m","messages":[],"n":Infinity}'


def test_internal_fields_of_a_too_deeply_nested_body_are_refused() -> None:
    raw = b'{"model":"m","messages":[],"kv_transfer_params":{},"x":%b%b}' % (b"[" * 1010, b"]" * 1010)
    with pytest.raises(BadRequest, match="nested too deeply"):
        parse(CHAT, raw)


@pytest.mark.parametrize(
    ("fields", "adapters"),
    [
        ({}, ()),
        ({"lora_path": None}, ()),
        ({"lora_path": "a"}, ("a",)),
        ({"lora_path": ["a", None, "b"]}, ("a", "b")),
        ({"lora_request": {"lora_name": "a", "lora_int_id": 1, "lora_path": "/b"}}, ("a", "/b")),
        ({"lora_path": 7, "kv_transfer_params": {}}, ("7",)),
    ],
)
def test_adapters_in_other_fields_are_found(fields: dict[str, object], adapters: tuple[str, ...]) -> None:
    assert parse(CHAT, body(model="m", messages=[USER], **fields)).adapters == adapters


@pytest.mark.parametrize(
    ("path", "fields", "left"),
    [
        (CHAT, {"vllm_xargs": {"kv_transfer_params": "x", "mine": 1}}, {"vllm_xargs": {"mine": 1}}),
        (
            "/inference/v1/generate",
            {"sampling_params": {"seed": 1, "extra_args": {"kv_transfer_params": {"remote_host": "x"}}}},
            {"sampling_params": {"seed": 1, "extra_args": {}}},
        ),
    ],
)
def test_internal_fields_in_merged_objects_are_removed(
    path: str, fields: dict[str, object], left: dict[str, object]
) -> None:
    assert json.loads(parse(path, body(model="m", messages=[USER], **fields)).body) == {
        "model": "m",
        "messages": [USER],
        **left,
    }


def test_arguments_for_engine_extensions_are_kept() -> None:
    raw = body(model="m", messages=[USER], vllm_xargs={"mine": 1}, extra_args=None, sampling_params=[])
    assert parse(CHAT, raw).body is raw


def test_kv_transfer_params_in_a_text_is_kept() -> None:
    raw = body(model="m", messages=[{"role": "user", "content": '"kv_transfer_params"'}])
    assert parse(CHAT, raw).body is raw


def test_a_text_in_parts_equals_the_text_in_one() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}
    assert prompt_of(parts) == prompt_of(USER)


@pytest.mark.parametrize(
    "other",
    [
        [{"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": "hello", "tool_calls": [{"id": "1"}]}],
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello"}, {"type": "image_url", "image_url": {"url": "u"}}],
            }
        ],
    ],
)
def test_roles_tool_calls_and_images_make_another_prompt(other: list[object]) -> None:
    assert prompt_of(*other) != prompt_of(USER)


def test_tools_come_first() -> None:
    with_tools = prompt_of(USER, tools=[{"type": "function", "function": {"name": "f"}}])
    assert with_tools.endswith(prompt_of(USER))
    assert not with_tools.startswith(b"user")


def test_a_longer_conversation_starts_with_the_shorter() -> None:
    response = {"role": "assistant", "content": "hi"}
    assert prompt_of(USER, response, USER).startswith(prompt_of(USER, response))


def test_an_image_counts_its_tokens_and_not_its_base64() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    assert 225 <= chat({"role": "user", "content": [image]}).prompt.tokens < 240


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("abcd", (b"abcd",)),
        (["ab", "cd"], (b"ab", b"cd")),
        ([1, 2], (b"\1\0\0\0\2\0\0\0",)),
        ([[1], [2]], (b"\1\0\0\0", b"\2\0\0\0")),
        (None, ()),
        ([], ()),
    ],
)
def test_completion_prompts_of_every_form_are_parsed(prompt: object, parts: tuple[bytes, ...]) -> None:
    assert parse("/v1/completions", body(prompt=prompt)).prompt == Prompt(parts)


@pytest.mark.parametrize("prompt", [1, {"a": 1}, [1, "a"], [[-1]], [[2**40]]])
def test_prompts_of_unknown_forms_are_refused(prompt: object) -> None:
    with pytest.raises(BadRequest):
        parse("/v1/completions", body(prompt=prompt))


def test_a_token_counts_as_four_bytes_in_every_form() -> None:
    assert parse("/v1/completions", body(prompt=[7] * 100)).prompt.tokens == 100
    assert parse("/v1/completions", body(prompt="x" * 400)).prompt.tokens == 100


def test_responses_and_messages_put_the_instructions_first() -> None:
    responses = parse("/v1/responses", body(instructions="be brief", input="hello"))
    messages = parse("/v1/messages", body(system=[{"type": "text", "text": "be brief"}], messages=[USER], max_tokens=3))
    assert responses.prompt.parts == messages.prompt.parts == (b"system\nbe briefuser\nhello\n",)


def test_previous_response_id_is_read() -> None:
    assert parse("/v1/responses", body(input="a", previous_response_id="resp_1")).previous_response_id == "resp_1"


def test_sglangs_own_api_has_its_own_names() -> None:
    fields = {"input_ids": [1, 2], "extra_key": "tenant", "sampling_params": {"max_new_tokens": 7}, "stream": True}
    parsed = parse("/generate", body(**fields))
    assert (parsed.model, parsed.max_tokens, parsed.stream) == (None, 7, True)
    assert parsed.prompt == Prompt((b"\1\0\0\0\2\0\0\0",), "tenant")
    assert parse("/generate", body(text=["a", "b"], cache_salt="no")).prompt == Prompt((b"a", b"b"))
    assert parse("/generate", body(input_ids=[[1], [2]], sampling_params=[{"max_new_tokens": 3}, {}])).max_tokens == 3
    assert parse("/generate", body(sampling_params="odd", extra_key=5)).prompt == Prompt()


def test_rerank_and_score_have_the_query_before_each_document() -> None:
    assert parse("/rerank", body(query="q", documents=["a", {"text": "b"}])).prompt.parts == (b"qa", b'q{"text":"b"}')
    assert parse("/score", body(text_1="q", text_2="a")).prompt.parts == (b"qa",)


def test_pairs_of_a_query_and_a_document_are_bounded_by_the_size_of_the_body() -> None:
    many = {"query": ["a"] * 2000, "documents": ["b"] * 2000}
    assert parse("/score", body(**many)).prompt.parts == (b"ab",) * 2000
    assert len(parse("/score", body(query=["a"] * 2000, documents=["b"] * 1000)).prompt.parts) == 3000
    parts = parse("/rerank", body(query="q" * 10_000, documents=["b"] * 1000)).prompt.parts
    assert sum(map(len, parts)) < 20_000


def test_references_to_media_do_not_expand_without_bound() -> None:
    parts = [{"type": "video"}] * 2000
    (prompt,) = parse(CHAT, body(messages=[{"role": "user", "content": parts}])).prompt.parts
    assert len(prompt) < 2**21


FORM = (
    b'--b\r\nContent-Disposition: form-data; name="language"\r\n\r\nen\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\0\1\r\n--b--\r\n'
)


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=b", 'Multipart/Form-Data; boundary="b"'])
def test_the_model_of_a_form_is_found(kind: str) -> None:
    parsed = parse("/v1/audio/transcriptions", FORM, kind)
    assert (parsed.model, parsed.body) == ("whisper", FORM)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ("model", "messages", "prompt", "input", "tools", "system", "query", "documents", "stream", "max_tokens")
PATHS = (CHAT, "/v1/chat/completions/batch", "/v1/completions", "/v1/responses", "/v1/messages", "/rerank", "/pooling")


@given(path=st.sampled_from(PATHS), fields=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_json_object_is_parsed_or_refused(path: str, fields: dict[str, object]) -> None:
    with suppress(BadRequest):
        assert all(isinstance(part, bytes) for part in parse(path, body(**fields)).prompt.parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with suppress(BadRequest):
        parse(CHAT, raw)


def test_the_system_prompt_ends_at_the_first_response() -> None:
    question, response = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    system = {"role": "system", "content": "s"}
    assert chat(question).prompt.starts_conversation
    assert chat(system, question).prompt.starts_conversation
    assert not chat(question, response, question).prompt.starts_conversation
    batch = parse("/v1/chat/completions/batch", body(model="m", messages=[[question, response, question]]))
    assert not batch.prompt.starts_conversation
    assert not parse(
        "/v1/completions", body(model="m", prompt="user\na\nassistant\nb", messages=5)
    ).prompt.starts_conversation


def test_a_long_salt_is_replaced_by_a_digest() -> None:
    usual, long, other = (
        chat(USER, cache_salt=salt).prompt.salt for salt in ("s" * 1024, "s" * 100_000, "s" * 100_001)
    )
    assert usual == "s" * 1024
    assert long != other
    assert max(len(long), len(other)) < 100
    assert chat(USER, cache_salt="\ud800" * 2000).prompt.salt != long
