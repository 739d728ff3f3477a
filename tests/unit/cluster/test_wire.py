"""Records, and bytes that are not records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import UNREADABLE, RecordKind, record, records

KINDS = st.sampled_from(list(RecordKind))
RECORDS = st.lists(st.tuples(KINDS, st.binary(max_size=60)), max_size=6)


@given(RECORDS)
def test_records_round_trip(sent: list[tuple[RecordKind, bytes]]) -> None:
    assert list(records(b"".join(record(kind, body) for kind, body in sent))) == sent


@given(RECORDS.filter(bool), st.data())
def test_a_truncated_record_is_malformed(sent: list[tuple[RecordKind, bytes]], data: st.DataObject) -> None:
    batch = b"".join(record(kind, body) for kind, body in sent)
    last = len(record(*sent[-1]))
    cut = data.draw(st.integers(len(batch) - last + 1, len(batch) - 1))
    with pytest.raises(UNREADABLE):
        list(records(batch[:cut]))


def test_a_kind_of_a_later_version_is_skipped() -> None:
    unknown = b"\xfe" + (3).to_bytes(4, "little") + b"???"
    assert list(records(record(RecordKind.READY, b"") + unknown + record(RecordKind.LOAD, b"x"))) == [
        (RecordKind.READY, b""),
        (RecordKind.LOAD, b"x"),
    ]
