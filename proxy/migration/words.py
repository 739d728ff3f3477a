"""Command lines of other programs, read by a table of how many words their flags take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.migration.files import Unreadable

MANY = -1
"""As many words as there are up to the next flag."""

Found = dict[str, list[list[str]]]
"""The words of every occurrence of a flag, in order."""


def read(words: Sequence[str], arities: Mapping[str, int]) -> tuple[Found, Found]:
    """Flags that are known, and those that are not, with the words that seem to be theirs. The words before the first
    flag are the program's name. Raises Unreadable."""
    found: Found = {}
    unknown: Found = {}
    rest = list(words)
    while rest and not rest[0].startswith("--"):
        rest.pop(0)
    if words and not rest:
        raise Unreadable("there is no flag in it; write it as it is written for the other program")
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise Unreadable(f"'{flag}' belongs to no flag")
        arity = arities.get(flag)
        taken = [value] if equals else _take(rest, MANY if arity is None else arity, flag)
        (unknown if arity is None else found).setdefault(flag, []).append(taken)
    return found, unknown


def _take(rest: list[str], arity: int, flag: str) -> list[str]:
    taken: list[str] = []
    while rest and (arity == MANY or len(taken) < arity) and not rest[0].startswith("--"):
        taken.append(rest.pop(0))
    if len(taken) < arity:
        raise Unreadable(f"{flag} wants {arity} words")
    return taken
