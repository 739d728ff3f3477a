"""Which pod keeps which response."""

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.fleet.bindings import Bindings

A, B = Endpoint("a"), Endpoint("b")


def test_a_response_is_found_where_it_was_bound() -> None:
    bindings = Bindings(ManualClock())
    bindings.bind("r1", A)
    bindings.bind("r2", B)
    assert bindings.find("r1") is A
    assert bindings.find("r2") is B
    assert bindings.find("r3") is None


def test_a_binding_expires_after_its_last_use() -> None:
    clock = ManualClock()
    bindings = Bindings(clock, ttl=10)
    bindings.bind("used", A)
    bindings.bind("unused", A)
    clock.advance(6)
    assert bindings.find("used") is A
    clock.advance(6)
    assert bindings.find("used") is A
    assert bindings.find("unused") is None
    clock.advance(10)
    assert bindings.find("used") is None


def test_expired_bindings_are_dropped_when_another_is_made() -> None:
    clock = ManualClock()
    bindings = Bindings(clock, ttl=10)
    for number in range(5):
        bindings.bind(f"r{number}", A)
    clock.advance(10)
    bindings.bind("new", B)
    assert len(bindings.table) == 1


def test_the_least_recently_used_binding_is_evicted_first() -> None:
    bindings = Bindings(ManualClock(), limit=2)
    bindings.bind("r1", A)
    bindings.bind("r2", A)
    bindings.find("r1")
    bindings.bind("r3", A)
    assert [bindings.find(name) for name in ("r1", "r2", "r3")] == [A, None, A]


def test_bindings_of_a_removed_pod_are_dropped() -> None:
    bindings = Bindings(ManualClock())
    bindings.bind("r1", A)
    bindings.bind("r2", B)
    bindings.forget(A)
    assert bindings.find("r1") is None
    assert bindings.find("r2") is B


def test_a_response_bound_again_belongs_to_the_last_pod() -> None:
    bindings = Bindings(ManualClock())
    bindings.bind("r", A)
    bindings.bind("r", B)
    assert bindings.find("r") is B
    assert len(bindings.table) == 1


def test_an_unknown_response_may_appear_only_if_another_process_may_have_relayed_it() -> None:
    bindings = Bindings(ManualClock())
    assert not bindings.may_appear("r1", [A, B])
    bindings.table.on_bind = lambda key, endpoint: None  # published to others
    assert bindings.may_appear("r1", [A, B])
    assert not bindings.may_appear("r1", [A])  # the only pod has it, or none
    bindings.bind("r1", A)
    assert not bindings.may_appear("r1", [A, B])
