"""What was confirmed lately."""

from __future__ import annotations

from proxy.cluster.prefixes import Journal

A, B = 1, 2


def chain(number: int, blocks: int = 4) -> bytes:
    return b"".join((number * 100 + block).to_bytes(8, "little") for block in range(blocks))


def keep(journal: Journal, number: int, pod: int = A, all_know: bool = True) -> None:
    journal.add({(pod, number): chain(number)}, all_know)


def test_the_oldest_entry_is_dropped_when_full() -> None:
    journal = Journal(102)
    for number in range(4):
        keep(journal, number)
    assert journal.latest(1000) == [(A, chain(1)), (A, chain(2)), (A, chain(3))]
    assert journal.size == 96


def test_a_confirmed_entry_is_kept_once_and_longest() -> None:
    journal = Journal(102)
    for number in (0, 1, 2, 0, 3):
        keep(journal, number)
    assert journal.latest(1000) == [(A, chain(2)), (A, chain(0)), (A, chain(3))]


def test_a_removed_pod_leaves_no_entries() -> None:
    journal = Journal(1000)
    keep(journal, 1, A)
    keep(journal, 1, B)
    journal.forget(A)
    assert journal.latest(1000) == [(B, chain(1))]
    assert journal.size == 32


def test_known_entries_are_not_published_again() -> None:
    journal = Journal(1000)
    keep(journal, 1)
    keep(journal, 2, all_know=False)
    assert journal.known == {(A, 1): chain(1)}
    assert journal.get((A, 2)) == chain(2)
    journal.publish_whole_chains()
    assert journal.known == {}
    assert journal.get((A, 1)) == chain(1)


def test_dropped_entries_are_not_assumed_known() -> None:
    journal = Journal(102)
    for number in range(4):
        keep(journal, number)
    assert list(journal.known) == [(A, 2), (A, 3)], "the next to go may be gone elsewhere"
    keep(journal, 3, all_know=False)
    assert list(journal.known) == [(A, 2)]
    journal.forget(A)
    assert journal.known == {}


def test_many_removals_make_space_for_new_entries() -> None:
    journal = Journal(3200)
    for number in range(101):
        keep(journal, number)
    assert journal.latest(3200)[0] == (A, chain(8))
    assert journal.size == 93 * 32
    assert next(iter(journal.known)) == (A, 14)
