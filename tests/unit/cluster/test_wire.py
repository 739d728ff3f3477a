"""Records, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import Garbled, Kind, record, records

KINDS = st.sampled_from(list(Kind))
RECORDS = st.lists(st.tuples(KINDS, st.binary(max_size=60)), max_size=6)


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
