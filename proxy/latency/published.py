"""What is read of a pod when it is scored: published where it changes, and looked up for many pods at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import compress, repeat
from operator import add, attrgetter, gt, mul, ne, or_, sub
from typing import TypeVar

from proxy.core.endpoint import Endpoint, LoadView
from proxy.core.exchange import Exchange


class Nobody:
    """Stands first in line where nobody does."""

    first_byte_at: float | None = None


NOBODY = Nobody()

Terms = tuple[float, float, float]
"""Seconds: of any prompt, of an uncached token, and of a pair of tokens, of which every pair is two."""


class Published:
    """Of one pod, until something changes."""

    endpoint: Endpoint
    view: LoadView | None
    """The one that all this was made with; None if more has changed."""
    no_answer: None = None
    """What the first in line had when it was published."""
    head: Exchange | Nobody
    """The first in line."""
    due: float
    """When it should be answered."""
    patience: float
    """Seconds by which it is expected later for each that it is overdue, negative."""
    look_at: float
    """When to look whether it was."""
    rest: float
    """Seconds of work behind it."""
    own: Terms
    """What a prompt takes, once the pod turns to it."""
    cost: Terms
    """The same, and what it costs others."""
    step: float
    """Seconds per token of the answers that run."""
    tpot: float
    """The same of one more answer."""


P = TypeVar("P", bound=Published)

TTFT: Callable[[Published], Terms] = attrgetter("own")
COST: Callable[[Published], Terms] = attrgetter("cost")


def changed(pods: Sequence[P], now: float) -> Iterator[P]:
    """Those that have to catch up: another view, or an answer; what is not streamed gives no sign but its time."""
    news = map(ne, map(_state, pods), map(_published_state, pods))
    return compress(pods, map(or_, news, map(partial(gt, now), map(_look_at, pods))))


def seconds(
    pods: Sequence[Published],
    terms: Callable[[Published], Terms],
    uncached: Sequence[float],
    prompt: float,
    now: float,
) -> list[float]:
    """From now until each pod turns to a prompt, of which so many tokens are not cached there, and then by the `terms`:
    `TTFT` or `COST`. So: rest + wait + fixed + tokens * (per_token + per_pair * (2 * prompt - tokens)), where wait is
    what is left until it is due, or its share of what is overdue. All pods at once: no step of Python for each."""
    rests, dues, patiences = zip(*map(_line, pods), strict=True)
    fixed, per_token, per_pair = zip(*map(terms, pods), strict=True)
    left = list(map(sub, dues, repeat(now)))
    turns = map(add, rests, map(max, left, map(mul, left, patiences)))
    pairs = map(mul, per_pair, map(sub, repeat(2.0 * prompt), uncached))
    return list(map(add, map(add, turns, fixed), map(mul, uncached, map(add, per_token, pairs))))


def tpots(pods: Sequence[Published]) -> list[float]:
    """Seconds per token of one more answer."""
    return [pod.tpot for pod in pods]


_line = attrgetter("rest", "due", "patience")
_state = attrgetter("endpoint.view", "head.first_byte_at")
_published_state = attrgetter("view", "no_answer")
_look_at = attrgetter("look_at")
