"""Which session is bound to which pod, among workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import UNREADABLE, InvalidMessage, RecordKind
from proxy.cluster.shared import PER_RECORD, SharedSessions
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.fleet.bindings import BindingTable

TTL = 100.0


class Worker:
    """A worker with its own pods, of the same names everywhere. Its records reach `listeners`."""

    def __init__(self, name: str = "table") -> None:
        self.clock = ManualClock(1000.0)
        self.table = BindingTable(TTL, 10.0)
        self.pods = {name: Endpoint(name) for name in ("a", "b")}
        self.listeners: list[Worker] = []
        self.shared = SharedSessions(self.table, self.clock, name=name, publish=self._tell, find=self.pods.get)

    def _tell(self, kind: RecordKind, body: bytes) -> None:
        assert kind is RecordKind.SESSIONS
        for worker in self.listeners:
            worker.shared.receive(1, kind, body)

    def bind(self, session: str, pod: str) -> None:
        self.table.bind(session, self.pods[pod], self.clock.now())

    def pod_of(self, session: str) -> str | None:
        endpoint = self.table.get(session, self.clock.now())
        assert endpoint is None or endpoint is self.pods[endpoint.name]
        return endpoint.name if endpoint else None


def pair() -> tuple[Worker, Worker]:
    one, other = Worker(), Worker()
    one.listeners, other.listeners = [other], [one]
    return one, other


def test_a_session_bound_by_one_worker_is_bound_for_all() -> None:
    one, other = pair()
    one.bind("s", "a")
    assert other.pod_of("s") == "a"
    other.clock.advance(1.0)
    other.bind("s", "b")
    one.clock.advance(1.0)
    assert one.pod_of("s") == "b"


def test_use_in_one_worker_extends_it_in_the_others() -> None:
    one, other = pair()
    one.bind("s", "a")
    for worker in (one, other):
        worker.clock.advance(TTL - 1)
    one.bind("s", "a")
    other.clock.advance(2.0)
    assert other.pod_of("s") == "a"


def test_a_new_worker_gets_sessions_with_their_times() -> None:
    one, late = Worker(), Worker()
    for number in range(2 * PER_RECORD + 1):
        one.bind(f"{number}", "a")
    one.clock.advance(60.0)
    one.bind("0", "b")
    late.clock.advance(500.0)
    bodies = list(one.shared.lasting(1.0))
    assert len(bodies) == 3
    for kind, body in bodies:
        late.shared.receive(1, kind, body)
    assert (late.pod_of("0"), late.pod_of(f"{2 * PER_RECORD}"), len(late.table)) == ("b", "a", 2 * PER_RECORD + 1)
    late.clock.advance(TTL - 60.0)
    assert (late.pod_of("0"), late.pod_of(f"{2 * PER_RECORD}")) == ("b", None)


def test_older_updates_are_ignored() -> None:
    one, late = Worker(), Worker()
    one.bind("s", "a")
    one.clock.advance(5.0)
    late.bind("s", "b")
    for kind, body in one.shared.lasting(1.0):
        late.shared.receive(1, kind, body)
    assert late.pod_of("s") == "b"


def test_unknown_pods_and_other_tables_are_skipped() -> None:
    one, stranger, poor = Worker(), Worker("other"), Worker()
    one.listeners = [stranger, poor]
    del poor.pods["a"]
    one.bind("s", "a")
    assert (stranger.pod_of("s"), poor.pod_of("s")) == (None, None)


@pytest.mark.parametrize("harm", [lambda body: body[:-1], lambda body: body + b"x", lambda body: body[:-1] + b"\xff"])
def test_a_malformed_message_is_refused_completely(harm: Callable[[bytes], bytes]) -> None:
    one, other = Worker(), Worker()
    one.bind("s", "a")
    one.bind("t", "b")
    ((kind, body),) = one.shared.lasting(1.0)
    with pytest.raises(InvalidMessage):
        other.shared.receive(1, kind, harm(body))
    assert len(other.table) == 0


@given(st.binary(max_size=80))
def test_any_bytes_are_harmless(noise: bytes) -> None:
    worker = Worker()
    try:
        worker.shared.receive(1, RecordKind.SESSIONS, noise)
    except UNREADABLE:
        assert len(worker.table) == 0
