"""What was confirmed lately."""

from __future__ import annotations

from proxy.replicas.journal import Journal


def chain(number: int, blocks: int = 4) -> bytes:
    return b"".join((number * 100 + block).to_bytes(8, "little") for block in range(blocks))


def test_the_oldest_goes_when_there_is_no_room() -> None:
    journal = Journal(100)
    for number in range(4):
        journal.add("a", chain(number))
    assert list(journal) == [("a", chain(1)), ("a", chain(2)), ("a", chain(3))]
    assert journal.size == 96


def test_what_is_confirmed_again_is_kept_once_and_longest() -> None:
    journal = Journal(100)
    for number in (0, 1, 2, 0, 3):
        journal.add("a", chain(number))
    assert list(journal) == [("a", chain(2)), ("a", chain(0)), ("a", chain(3))]


def test_a_pod_that_is_forgotten_leaves_nothing() -> None:
    journal = Journal(1000)
    journal.add("a", chain(1))
    journal.add("b", chain(1))
    journal.forget("a")
    assert list(journal) == [("b", chain(1))]
    assert journal.size == 32
