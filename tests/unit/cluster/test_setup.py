"""What a worker is given when it starts."""

from __future__ import annotations

import datetime
import math
import socket
from typing import Any

import pytest

from proxy.cluster.messages import InvalidMessage, PacketKind, packet
from proxy.cluster.workers import Setup, packed_settings, read_settings
from proxy.core.params import FromEnvironment


def received(data: bytes) -> Setup:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        return Setup.receive(theirs)


def direct(body: bytes) -> bytes:
    return packet(PacketKind.DIRECT, bytes(8), 0, body, bytes(8)).packed


def test_a_worker_receives_its_setup() -> None:
    setup = Setup({"listen": {"port": 0}}, 3, "0102030405", 1, 2, [7, 8], [9], 10)
    assert received(direct(setup.packed()) + direct(b"later")) == setup


@pytest.mark.parametrize("size", [0, 5, 20, 35])
def test_a_supervisor_that_ends_during_the_setup_is_an_error(size: int) -> None:
    with pytest.raises(InvalidMessage, match="the connection ended"):
        received(direct(Setup({}, 1).packed())[:size])


def test_values_that_json_lacks_survive() -> None:
    given: Any = {"a": [1, 2.5, None, True, "x"], "b": {"inf": math.inf, "env": FromEnvironment("8000")}}
    packed = read_settings(packed_settings(given))
    assert packed == given
    assert isinstance(packed["b"]["env"], FromEnvironment)
    assert type(packed["a"][4]) is str


def test_keys_and_dates_become_texts() -> None:
    assert packed_settings({1: datetime.date(2030, 2, 3), False: "x"}) == {"1": "2030-02-03", "False": "x"}
