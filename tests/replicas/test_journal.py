"""What was confirmed lately."""

from __future__ import annotations

from array import array

from proxy.replicas.journal import Journal

A, B = 1, 2


def chain(number: int, blocks: int = 4) -> bytes:
    return b"".join((number * 100 + block).to_bytes(8, "little") for block in range(blocks))


def keep(journal: Journal, number: int, pod: int = A, all_know: bool = True) -> None:
    journal.add((pod, number), chain(number), all_know)


def known(journal: Journal, number: int) -> bytes:
    hashes = array("Q", chain(number)[:-8])
    hashes.append(number)
    return journal.longest_known(A, (hashes.tolist(), len(hashes), len(hashes), []))


def test_the_oldest_goes_when_there_is_no_room() -> None:
    journal = Journal(100)
    for number in range(4):
        keep(journal, number)
    assert list(journal) == [(A, chain(1)), (A, chain(2)), (A, chain(3))]
    assert journal.size == 96


def test_what_is_confirmed_again_is_kept_once_and_longest() -> None:
    journal = Journal(100)
    for number in (0, 1, 2, 0, 3):
        keep(journal, number)
    assert list(journal) == [(A, chain(2)), (A, chain(0)), (A, chain(3))]


def test_a_pod_that_is_forgotten_leaves_nothing() -> None:
    journal = Journal(1000)
    keep(journal, 1, A)
    keep(journal, 1, B)
    journal.forget(A)
    assert list(journal) == [(B, chain(1))]
    assert journal.size == 32


def test_what_all_know_they_are_not_taken_to_know_anew() -> None:
    journal = Journal(1000)
    keep(journal, 1)
    keep(journal, 2, all_know=False)
    assert known(journal, 1) == chain(1)
    assert known(journal, 2) == b""
    assert journal.get((A, 2)) == chain(2)
    journal.begin_anew()
    assert known(journal, 1) == b""
    assert journal.get((A, 1)) == chain(1)
