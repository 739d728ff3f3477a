"""Every form in which engines publish KV events is parsed, and malformed ones are harmless."""

from __future__ import annotations

from array import array
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.ports import AllCleared, BlocksRemoved, BlocksStored, KvEvent

msgpack = pytest.importorskip("msgpack", reason="needs the extra: pip install 'kvlane[precise]'")

from proxy.prefix import kv_messages  # noqa: E402
from proxy.prefix.kv_messages import InvalidEvent  # noqa: E402
from tests.helpers.prefix.recorded import SAMPLES, payloads  # noqa: E402


def read(*events: Any, rank: Any = None) -> kv_messages.EventBatch:
    return kv_messages.batch(msgpack.packb([12.5, list(events), *([] if rank is None else [rank])]))


def events_of(batch: kv_messages.EventBatch) -> list[KvEvent]:
    return [event for events, _ in batch.steps() for event in events]


def odd_of(batch: kv_messages.EventBatch) -> int:
    return sum(odd for _, odd in batch.steps())


def ids(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_messages_of_a_real_engine_are_parsed(sample: Path) -> None:
    batches = [kv_messages.batch(payload) for payload in payloads(sample)]
    assert batches
    assert [odd_of(batch) for batch in batches] == [0] * len(batches)
    assert all(later.at > earlier.at for earlier, later in pairwise(batches))
    for event in (event for batch in batches for event in events_of(batch) if isinstance(event, BlocksStored)):
        assert len(event.tokens) == 4 * event.block_size * len(event.hashes)
        assert event.medium == "gpu"


def test_adapters_and_salts_of_a_real_engine_are_parsed() -> None:
    (sample,) = [path for path in SAMPLES if path.stem == "bytes_and_adapters"]
    events = [event for payload in payloads(sample) for event in events_of(kv_messages.batch(payload))]
    stored = [event for event in events if isinstance(event, BlocksStored)]
    assert {event.lora for event in stored} == {"", "adapter1", "adapter2"}
    assert [(event.lora, event.keys[0]) for event in stored if event.keys] == [("", ["tenant-a"]), ("adapter2", ["s"])]
    assert all(isinstance(name, bytes) for event in stored for name in event.hashes)


def test_arrays_and_maps_are_equivalent() -> None:
    stored = ["BlockStored", [1, 2], 9, [5, 6, 7, 8], 2, None, "CPU", "poems", [["poems", "salt"], ["poems"]], 1]
    names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
    names += ["extra_keys", "group_idx"]
    batch = read(stored, ["BlockRemoved", [1], "CPU", 1], ["AllBlocksCleared"])
    same = read(
        dict(zip(names, stored, strict=True)),
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "group_idx": 1},
        {"type": "AllBlocksCleared"},
    )
    assert events_of(batch) == events_of(same)
    assert events_of(batch) == [
        BlocksStored([1, 2], 9, ids(5, 6, 7, 8), 2, "poems", "cpu", [["salt"], None], 1),
        BlocksRemoved([1], "cpu", 1),
        AllCleared(),
    ]


def test_omitted_last_fields_have_their_defaults() -> None:
    batch = read(["BlockStored", [1], None, [5, 6], 2], ["BlockRemoved", [1]])
    assert events_of(batch) == [BlocksStored([1], None, ids(5, 6), 2), BlocksRemoved([1])]
    assert batch.rank == 0
    assert read(rank=3).rank == 3


def test_additional_fields_of_later_versions_are_ignored() -> None:
    array_form = ["BlockStored", [1], None, [5], 1, None, "GPU", None, None, 0, "full_attention", None, "new", "newer"]
    map_form = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "surprise": {"a": 1}}
    assert len(events_of(read(array_form, map_form))) == 2


def test_an_adapter_with_only_a_number_is_not_its_base_model() -> None:
    (event,) = events_of(read(["BlockStored", [1], None, [5], 1, 7]))
    assert isinstance(event, BlocksStored)
    assert event.lora == "#7"


def test_layers_that_need_only_some_blocks_are_left_out() -> None:
    sliding = {"type": "BlockStored", "block_hashes": [1], "token_ids": [5], "block_size": 1, "group_idx": 1}
    batch = read(sliding | {"kv_cache_spec_kind": "sliding_window"}, sliding | {"kv_cache_spec_kind": "mla_attention"})
    assert len(events_of(batch)) == 1
    assert odd_of(batch) == 0


@pytest.mark.parametrize(
    "event",
    [
        ["BlockMoved", [1]],
        ["BlockStored"],
        ["BlockStored", "no hashes", None, [1], 1],
        ["BlockStored", [1], None, [1, 2, 3], 2],
        ["BlockStored", [1], None, [-1], 1],
        ["BlockStored", [1], None, ["a"], 1],
        ["BlockStored", [1], None, [1], 0],
        ["BlockStored", [1, 2], None, [1, 2], 1, None, None, None, [["only one"]]],
        ["BlockStored", [1], None, [1], 1, None, None, ["lora"]],
        ["BlockStored", [1], None, [1], 1, None, None, 7],
        ["BlockStored", [1], None, [1], 1, ["lora"]],
        ["BlockStored", [1], None, [1], 1, None, {"medium": 1}],
        ["BlockStored", [1], None, [1], 1, None, "m" * 2000],
        ["BlockStored", [1], None, [1], 1, None, None, None, [7]],
        ["BlockStored", [1], None, [1], 1, None, None, None, [[[["nested"]]]]],
        ["BlockStored", [1], None, [1], 1, None, None, None, None, [7]],
        ["BlockStored", [b"h" * 100], None, [1], 1],
        {"type": "BlockRemoved"},
        {"no": "type"},
        [],
        "text",
        7,
        None,
    ],
    ids=str,
)
def test_a_malformed_event_is_skipped_and_counted(event: Any) -> None:
    batch = read(event, ["BlockRemoved", [1]])
    assert events_of(batch) == [BlocksRemoved([1])]
    assert odd_of(batch) == 1


def test_a_large_batch_is_parsed_in_steps() -> None:
    steps = list(
        read(
            *(["BlockRemoved", [number]] for number in range(2 * kv_messages.STEP + 1)), *[None] * kv_messages.STEP
        ).steps()
    )
    assert [(len(events), odd) for events, odd in steps] == [
        (kv_messages.STEP, 0),
        (kv_messages.STEP, 0),
        (1, kv_messages.STEP - 1),
        (0, 1),
    ]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_malformed(payload: bytes) -> None:
    try:
        batch = kv_messages.batch(payload)
    except InvalidEvent:
        return
    assert isinstance(batch.at, float)


@pytest.mark.parametrize(
    "payload", [7, None, [], [1.0], [1.0, None], ["now", []], [True, []], [1.0, [], -1], [1.0, [], 1 << 40]], ids=str
)
def test_an_invalid_batch_is_malformed(payload: Any) -> None:
    with pytest.raises(InvalidEvent):
        kv_messages.batch(msgpack.packb(payload))


def test_a_message_has_three_frames_and_a_replayed_one_an_additional_empty_one() -> None:
    number = (258).to_bytes(8, "big")
    assert kv_messages.message([b"topic", number, b"x"]) == ("topic", 258, b"x")
    assert (
        kv_messages.replayed([b"", b"topic", number, b"x"]) == kv_messages.replayed([b"", number, b"x"]) == (258, b"x")
    )
    for frames in ([], [b"topic"], [b"topic", b"12", b"x"], [b"", b"", b"", number, b"x"]):
        with pytest.raises(InvalidEvent):
            kv_messages.message(frames)
        with pytest.raises(InvalidEvent):
            kv_messages.replayed(frames)
