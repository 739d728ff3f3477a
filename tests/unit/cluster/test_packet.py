"""What hosts say to each other, as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import (
    ID_BYTES,
    SHARED,
    VERSION,
    Garbled,
    Kind,
    Packet,
    Say,
    frame,
    host_of,
    members,
    record,
    records,
    shared,
    version_of,
)

HOST = b"a host's"


@given(
    say=st.sampled_from(Say), host=st.binary(min_size=8, max_size=8), number=st.integers(0, 2**64 - 1), body=st.binary()
)
def test_a_packet_is_read_as_it_was_written(say: Say, host: bytes, number: int, body: bytes) -> None:
    packet = Packet(say, host, number, body)
    assert Packet.read(packet.packed()) == packet
    assert host_of(packet.packed()) == host


@given(parts=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary())))
def test_members_come_out_as_they_went_in(parts: list[tuple[int, bytes]]) -> None:
    assert list(members(b"".join(frame(*part) for part in parts))) == parts


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_packet_or_garbled(data: bytes) -> None:
    try:
        packet = Packet.read(data)
        if packet is not None:
            list(members(packet.body))
    except Garbled:
        pass


def test_a_packet_of_another_version_is_passed_over() -> None:
    packed = Packet(Say.NEWS, HOST, 1, b"").packed()
    for version in {*range(256)} - {VERSION}:
        assert Packet.read(bytes([version]) + packed[1:]) is None
        assert version_of(bytes([version]) + packed[1:]) == version
    assert Packet.read(packed[:1] + b"\xff" + packed[2:]) is None


@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_members_that_are_cut_off_are_garbled(size: int) -> None:
    with pytest.raises(Garbled):
        list(members(frame(1, b"ab")[:size]))


@given(kinds=st.lists(st.sampled_from(Kind)))
def test_only_what_hosts_may_tell_each_other_is_told(kinds: list[Kind]) -> None:
    batch = b"".join(record(kind, bytes([number % 256])) for number, kind in enumerate(kinds))
    assert [kind for kind, _ in records(shared(batch))] == [kind for kind in kinds if kind in SHARED]


def test_what_a_supervisor_tells_its_workers_is_never_taken_from_another_host() -> None:
    assert shared(record(Kind.QUESTION, b"reload")) == b""
    assert not SHARED & {
        Kind.QUESTION,
        Kind.REPLY,
        Kind.EJECTIONS,
        Kind.POD,
        Kind.METRICS,
        Kind.ROLL,
        Kind.SNAPSHOT,
        Kind.VANISHED,
        Kind.STOPPING,
    }
    assert len(HOST) == ID_BYTES
