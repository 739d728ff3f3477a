"""Bodies of records that other processes send are read into typed values, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.auth.limits import RateLimiter
from proxy.cluster import messages as bodies
from proxy.cluster.messages import InvalidMessage, RecordKind
from proxy.cluster.replica import LEASE
from proxy.cluster.shared import Shared, SharedBreakers, SharedEjections, SharedLimits, SharedSessions
from proxy.core.ports import ManualClock
from proxy.fleet.bindings import BindingTable
from proxy.fleet.store import Fleet
from proxy.reliability.breaker import Breakers
from proxy.reliability.settings import BreakerSettings


@pytest.mark.parametrize(
    ("read", "body", "value"),
    [
        (bodies.hosts, b"[2,1,true]", (2, 1, True)),
        (bodies.read_question, bodies.question(b"receiver", 1.0), (b"receiver", 1.0)),
        (bodies.facts, b'{"name":"n","config":"c"}', ("n", "c")),
    ],
)
def test_a_body_is_parsed_into_typed_values(read: Callable[[bytes], object], body: bytes, value: object) -> None:
    assert read(body) == value


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (bodies.hosts, b"[0,0,true]"),
        (bodies.hosts, b"[2,2,true]"),
        (bodies.read_question, bodies.question(b"receiver", 1.0)[:-1]),
        (bodies.read_question, bodies.question(b"receiver", -1.0)),
        (bodies.read_question, bodies.question(b"receiver", float("nan"))),
        (bodies.facts, b'{"name":"n"}'),
        (bodies.facts, b'{"name":"n","config":5}'),
    ],
)
def test_a_malformed_body_is_refused(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(InvalidMessage):
        read(body)


def nothing(*_: object) -> None:
    raise AssertionError("nothing of a garbled record is applied")


FLEET = Fleet(ManualClock())
EJECTIONS = SharedEjections(dict, nothing, nothing)
BINDINGS = SharedSessions(BindingTable(60.0, 0.0), ManualClock(), name="responses", publish=nothing, find=nothing)
BREAKERS = SharedBreakers(Breakers(BreakerSettings(), ManualClock(), FLEET, nothing), FLEET.get, nothing)


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (EJECTIONS, b'[["p",5]]'),
        (EJECTIONS, b'["p"]'),
        (EJECTIONS, b'[["p",[5]]]'),
        (BINDINGS, b"5"),
        (BINDINGS, b'[[1,"00",0.0,["p"]]]'),
        (BINDINGS, b'[[1,"00",0.0,"b"],["00"]]'),
        (BREAKERS, b"["),
        (BREAKERS, b'[["p"],1,"opened"]'),
        (BREAKERS, b'[["p",1,"ajar"]]'),
        (BREAKERS, b'[[["p"],1,"opened"]]'),
    ],
)
def test_malformed_entries_are_refused_and_none_is_applied(value: Shared, body: bytes) -> None:
    with pytest.raises(InvalidMessage):
        value.receive(1, value.kinds[0], body)


@pytest.mark.parametrize("spent", [b'1,["nan",1,1,1,1]', b"1,[1e308,1e308,1,1,1]", b"-1,[1,1,1,1,1]"])
def test_impossible_charges_are_refused(spent: bytes) -> None:
    limiter = RateLimiter({}, {}, ManualClock(), lambda *_: None)
    with pytest.raises(InvalidMessage):
        SharedLimits(limiter, nothing, LEASE).receive(1, RecordKind.SPENT, b'[[["key","team","default"],%b]]' % spent)
