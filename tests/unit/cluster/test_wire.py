"""Frames and records, and what is neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import EVERYBODY, LARGEST_FRAME, Frames, Garbled, Kind, frame, record, records

KINDS = st.sampled_from(list(Kind))
RECORDS = st.lists(st.tuples(KINDS, st.binary(max_size=60)), max_size=6)


@given(st.lists(st.tuples(st.integers(0, EVERYBODY), st.binary(max_size=50)), max_size=6), st.integers(1, 30))
def test_frames_are_found_with_any_splits_of_the_stream(sent: list[tuple[int, bytes]], size: int) -> None:
    stream = b"".join(frame(address, data) for address, data in sent)
    frames = Frames()
    got = [each for at in range(0, len(stream), size) for each in frames.feed(stream[at : at + size])]
    assert got == sent


@given(RECORDS)
def test_records_round_trip(sent: list[tuple[Kind, bytes]]) -> None:
    assert list(records(b"".join(record(kind, body) for kind, body in sent))) == sent


@given(RECORDS.filter(bool), st.data())
def test_a_truncated_record_is_malformed(sent: list[tuple[Kind, bytes]], data: st.DataObject) -> None:
    batch = b"".join(record(kind, body) for kind, body in sent)
    last = len(record(*sent[-1]))
    cut = data.draw(st.integers(len(batch) - last + 1, len(batch) - 1))
    with pytest.raises(Garbled):
        list(records(batch[:cut]))


def test_a_kind_of_a_later_version_is_skipped() -> None:
    unknown = b"\xfe" + (3).to_bytes(4, "little") + b"???"
    assert list(records(record(Kind.READY, b"") + unknown + record(Kind.LOAD, b"x"))) == [
        (Kind.READY, b""),
        (Kind.LOAD, b"x"),
    ]


def test_an_oversized_frame_is_malformed() -> None:
    with pytest.raises(Garbled, match="frame of"):
        list(Frames().feed((LARGEST_FRAME + 1).to_bytes(4, "little") + bytes(4)))
