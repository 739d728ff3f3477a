"""The columns: what they show of a pod, and how they sort it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.top.picture import Pod

Key = float | str


@dataclass(frozen=True, slots=True)
class Column:
    """`width` in characters; the pod's name takes what is left. `falls`: the largest come first unless reversed."""

    title: str
    width: int
    show: Callable[[Pod], str]
    key: Callable[[Pod], Key]
    falls: bool = True


def number(value: float | None) -> str:
    """In four characters as far as it goes: 7, 12.5, 950, 8.1k."""
    if value is None:
        return "-"
    if value >= 999.5:
        return f"{value / 1000:.1f}k" if value < 99_950 else f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 99.5 or value == round(value) else f"{value:.1f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f}ms" if value < 0.9995 else f"{value:.1f}s" if value < 99.95 else f"{value:.0f}s"


def _least(value: float | None) -> float:
    return -1.0 if value is None else value


_CONDITIONS = ("ready", "starting", "stale", "doubted", "probing", "broken", "draining", "leaving", "ejected")
"""Best first: by them the worst stand above."""


def _badness(pod: Pod) -> float:
    return _CONDITIONS.index(pod.condition) if pod.condition in _CONDITIONS else len(_CONDITIONS)


COLUMNS: Sequence[Column] = (
    Column("POD", 0, lambda pod: pod.name, lambda pod: pod.name, falls=False),
    Column("ROLE", 7, lambda pod: pod.role or "-", lambda pod: pod.role, falls=False),
    Column("STATE", 8, lambda pod: pod.condition, _badness),
    Column("FLY", 4, lambda pod: number(pod.requests), lambda pod: pod.requests),
    Column("WAIT", 4, lambda pod: number(pod.waiting), lambda pod: pod.waiting),
    Column("RUN", 4, lambda pod: number(pod.running), lambda pod: pod.running),
    Column("KV", 4, lambda pod: share(pod.kv), lambda pod: pod.kv),
    Column("HIT", 4, lambda pod: share(pod.figures.hit_ratio), lambda pod: _least(pod.figures.hit_ratio)),
    Column("TTFT50", 6, lambda pod: seconds(pod.figures.ttft_50), lambda pod: _least(pod.figures.ttft_50)),
    Column("TTFT90", 6, lambda pod: seconds(pod.figures.ttft_90), lambda pod: _least(pod.figures.ttft_90)),
    Column("TOK/S", 5, lambda pod: number(pod.figures.tokens), lambda pod: _least(pod.figures.tokens)),
    Column("REQ/S", 5, lambda pod: number(pod.rate), lambda pod: _least(pod.rate)),
    Column("ERR/S", 5, lambda pod: number(pod.failures), lambda pod: _least(pod.failures)),
)
TITLES = tuple(column.title for column in COLUMNS)
FIRST = "FLY"


@dataclass(frozen=True, slots=True)
class Order:
    """`at` is the position of the column in COLUMNS."""

    at: int = TITLES.index(FIRST)
    is_reversed: bool = False

    def of(self, pods: Sequence[Pod]) -> list[Pod]:
        """Equal pods stand by their names, so that they do not change places every second."""
        column = COLUMNS[self.at]
        by_name = sorted(pods, key=lambda pod: pod.name)
        return sorted(by_name, key=column.key, reverse=column.falls != self.is_reversed)

    def next(self, steps: int) -> Order:
        return Order((self.at + steps) % len(COLUMNS), self.is_reversed)

    def turned(self) -> Order:
        return Order(self.at, not self.is_reversed)
