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
def test_a_packet_round_trips(say: Say, host: bytes, number: int, body: bytes) -> None:
    packet = Packet(say, host, number, body)
    assert Packet.read(packet.packed()) == packet
    assert host_of(packet.packed()) == host


@given(parts=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary())))
def test_members_round_trip(parts: list[tuple[int, bytes]]) -> None:
    assert list(members(b"".join(frame(*part) for part in parts))) == parts


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_packet_or_malformed(data: bytes) -> None:
    try:
        packet = Packet.read(data)
        if packet is not None:
            list(members(packet.body))
    except Garbled:
        pass


def test_a_packet_of_another_version_is_skipped() -> None:
    packed = Packet(Say.NEWS, HOST, 1, b"").packed()
    for version in {*range(256)} - {VERSION}:
        assert Packet.read(bytes([version]) + packed[1:]) is None
        assert version_of(bytes([version]) + packed[1:]) == version
    assert Packet.read(packed[:1] + b"\xff" + packed[2:]) is None


@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_truncated_members_are_malformed(size: int) -> None:
    with pytest.raises(Garbled):
        list(members(frame(1, b"ab")[:size]))


@given(kinds=st.lists(st.sampled_from(Kind)))
def test_only_messages_for_hosts_are_published_to_hosts(kinds: list[Kind]) -> None:
    batch = b"".join(record(kind, bytes([number % 256])) for number, kind in enumerate(kinds))
    assert [kind for kind, _ in records(shared(batch))] == [kind for kind in kinds if kind in SHARED]


def test_messages_of_a_supervisor_are_not_accepted_from_another_host() -> None:
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
