"""Keys of a terminal, one at a time and unseen, and what they do."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from proxy.top.screen import View

SEQUENCES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "k": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "j": "down",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    " ": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "g": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    "G": "end",
    "s": "next",
    "\x1b[C": "next",
    "\x1bOC": "next",
    "S": "previous",
    "\x1b[D": "previous",
    "\x1bOD": "previous",
    "r": "reverse",
    "q": "quit",
    "Q": "quit",
}


def keys_in(typed: str) -> Iterator[str]:
    """A burst, as it comes over a slow line, can hold several; what is unknown is left out."""
    while typed:
        length = next((n for n in range(4, 0, -1) if typed[:n] in SEQUENCES), 0)
        if length:
            yield SEQUENCES[typed[:length]]
        typed = typed[length or 1 :]


def pressed(key: str, view: View, pods: int, rows: int) -> View:
    """What is seen then, of `pods` in so many `rows`."""
    if key in ("next", "previous"):
        return replace(view, order=view.order.next(1 if key == "next" else -1), top=0)
    if key == "reverse":
        return replace(view, order=view.order.turned(), top=0)
    steps = {"up": -1, "down": 1, "page up": -rows, "page down": rows, "home": -pods, "end": pods}
    return view.scrolled(steps.get(key, 0), pods, rows)


@contextmanager
def typed(call: Callable[[str], None]) -> Iterator[None]:
    """Calls with each key while it lasts; the terminal is as it was afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def read() -> None:
        for key in keys_in(os.read(number, 1024).decode("utf-8", "replace")):
            call(key)

    try:
        tty.setcbreak(number)
        loop.add_reader(number, read)
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
