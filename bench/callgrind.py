"""What valgrind's callgrind writes, by function."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

_NAMED = re.compile(r"\((\d+)\)(?: (.*))?$")
_VARIANT = re.compile(r"('\d+|\.(lto_priv|constprop|part|isra|cold)(\.\d+)*)+$")


@dataclass
class Profile:
    """Instructions and calls by function; `library` is where a function is."""

    own: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    library: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.own.values())

    @property
    def by_library(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, spent in self.own.items():
            found[self.library[name]] += spent
        return found


def read(lines: Iterable[str]) -> Profile:
    """What callgrind has written. Variants that the compiler made of a function count as one."""
    profile = Profile()
    names: dict[str, dict[str, str]] = {"fn": {}, "ob": {}}
    library = name = called = ""
    is_call = False
    for line in lines:
        key, _, value = line.partition("=")
        if key in ("fn", "cfn"):
            found = _VARIANT.sub("", _name(names["fn"], value))
            if key == "fn":
                name = found
                profile.library.setdefault(name, library)
            else:
                called = found
        elif key in ("ob", "cob"):
            where = _name(names["ob"], value).rpartition("/")[2]
            library = where if key == "ob" else library
        elif key == "calls":
            is_call = True
            profile.calls[called] += int(value.split()[0])
        elif line[:1] in "0123456789+-*" and line:
            if not is_call:  # else it is what the call took, which stands at the function that was called
                profile.own[name] += int(line.split()[1])
            is_call = False
    return profile


def _name(known: dict[str, str], value: str) -> str:
    """Names are written once, with a number, and then by their numbers."""
    found = _NAMED.match(value)
    if found is None:
        return value
    number, name = found.groups()
    if name is not None:
        known[number] = name
    return known[number]
