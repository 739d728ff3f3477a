"""What the engine counts, in the engine's own terms."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from proxy.lab.sim.sequence import Finish

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
END_TO_END_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)


class Histogram:
    """Seconds, counted by upper bound; the last count is that of +Inf."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine started."""

    steps: int = 0
    preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    external_tokens: int = 0
    """Of prompts, computed by other pods."""
    transfers: int = 0
    transferred_tokens: int = 0
    transfer_seconds: float = 0.0
    failed_transfers: int = 0
    expired_transfers: int = 0
    """What was kept for others, and not fetched in time."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BUCKETS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(END_TO_END_BUCKETS))
