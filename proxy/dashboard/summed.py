"""What several workers have sent to each pod, added up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.core.endpoint import Endpoint
from proxy.dashboard.series import Series

FAMILY = "attempts"


@dataclass(frozen=True, slots=True)
class Summed:
    """Implements `dashboard.pods.Counts`."""

    attempts: dict[str, int] = field(default_factory=dict)


class SummedCounts:
    """`series` gives those that were read last, another object each time; None before the first."""

    def __init__(self, series: Callable[[], Series | None]) -> None:
        self._series = series
        self._read: Series | None = None
        self._counts: dict[str, Summed] = {}

    def of(self, endpoint: Endpoint) -> Summed:
        series = self._series()
        if series is not None and series is not self._read:
            self._read, self._counts = series, _by_pod(series)
        return self._counts.get(endpoint.name, NOTHING)


def _by_pod(series: Series) -> dict[str, Summed]:
    counts: dict[str, Summed] = {}
    for (pod, ending), number in series.by(FAMILY, "endpoint", "ending").items():
        counts.setdefault(pod, Summed()).attempts[ending] = round(number)
    return counts


NOTHING = Summed()
