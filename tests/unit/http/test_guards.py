from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from proxy.core.ports import ManualClock
from proxy.http.guards import Sweep, Watched, check_all


@dataclass(eq=False)
class Stalling:
    seen: list[float] = field(default_factory=list)

    def check(self, now: float) -> None:
        self.seen.append(now)


@dataclass(eq=False)
class Broken:
    def check(self, now: float) -> None:
        raise RuntimeError("no look at me")


def test_a_connection_that_cannot_be_checked_does_not_spare_others(caplog: pytest.LogCaptureFixture) -> None:
    stalling = [Stalling(), Stalling()]

    everyone: list[Watched] = [stalling[0], Broken(), stalling[1]]
    check_all(everyone, 3.0)

    assert [one.seen for one in stalling] == [[3.0], [3.0]]
    assert "failed to check the timeouts of" in caplog.text


def test_a_connection_that_closes_during_the_check_is_harmless() -> None:
    clock = ManualClock(now=5.0)
    sweep = Sweep(clock, 4.0)
    stalling = Stalling()

    class Leaving:
        def check(self, now: float) -> None:
            sweep.watched.discard(self)

    everyone: list[Watched] = [Leaving(), stalling, Leaving()]
    sweep.watched.update(everyone)
    sweep.check()

    assert sweep.watched == {stalling}
    assert stalling.seen == [5.0]
