"""What processes send each other, as bytes."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import (
    ID_BYTES,
    LARGEST_PACKET,
    SHARED,
    VERSION,
    InvalidMessage,
    Packet,
    PacketKind,
    Packets,
    RecordKind,
    message,
    packet,
    packets,
    record,
    records,
)

IDS = st.binary(min_size=ID_BYTES, max_size=ID_BYTES)
TO_ONE = (PacketKind.ASK, PacketKind.STATE, PacketKind.DIRECT)


@st.composite
def some_packet(draw: st.DrawFn) -> Packet:
    kind = draw(st.sampled_from(PacketKind))
    to = draw(IDS) if kind in TO_ONE else None
    return packet(kind, draw(IDS), draw(st.integers(0, 2**64 - 1)), draw(st.binary(max_size=50)), to)


@given(sent=st.lists(some_packet(), max_size=6))
def test_packets_come_out_of_a_message_as_they_went_in(sent: list[Packet]) -> None:
    assert list(packets(message(b"".join(each.packed for each in sent)))) == sent


@given(sent=st.lists(some_packet(), max_size=6), size=st.integers(1, 30))
def test_packets_are_found_however_the_stream_is_cut(sent: list[Packet], size: int) -> None:
    stream, split = b"".join(each.packed for each in sent), Packets()
    got = [each for at in range(0, len(stream), size) for each in split.feed(stream[at : at + size])]
    assert got == sent
    assert not split.is_waiting


@given(data=st.binary(max_size=60))
def test_any_bytes_are_packets_or_garbled(data: bytes) -> None:
    with suppress(InvalidMessage):
        list(packets(data))


def test_a_message_begins_with_its_version() -> None:
    assert message(b"") == bytes([VERSION])


@given(sent=some_packet(), data=st.data())
def test_a_packet_that_is_cut_off_is_garbled(sent: Packet, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(sent.packed) - 1))
    with pytest.raises(InvalidMessage):
        list(packets(message(sent.packed[:cut])))


def test_a_packet_beyond_all_measure_of_an_unknown_kind_or_without_its_receiver_is_garbled() -> None:
    good = packet(PacketKind.NEWS, bytes(ID_BYTES), 1, b"").packed
    large = (LARGEST_PACKET + 1).to_bytes(4, "little") + good[4:]
    for bad in (large, good[:4] + b"\xee" + good[5:], good[:4] + bytes([PacketKind.ASK]) + good[5:]):
        with pytest.raises(InvalidMessage):
            list(Packets().feed(bad))


def test_messages_of_a_supervisor_are_not_accepted_from_another_host() -> None:
    assert not SHARED & {
        RecordKind.QUESTION,
        RecordKind.REPLY,
        RecordKind.EJECTIONS,
        RecordKind.POD,
        RecordKind.METRICS,
        RecordKind.ROLL,
        RecordKind.HOSTS,
        RecordKind.LEVELS,
        RecordKind.STOPPING,
    }
    assert list(records(record(RecordKind.QUESTION, b"reload"))) == [(RecordKind.QUESTION, b"reload")]
