"""How often a band has its turn."""

from __future__ import annotations

import pytest

from proxy.flowcontrol.capacity import ReflectiveCeilings


def turns(saturation: float, rank: float) -> str:
    reflection = ReflectiveCeilings()
    text = ""
    for _ in range(12):
        reflection.admitted(saturation, 0.0)
        text += "x" if reflection.is_open(saturation, rank, 0.0) else "."
    return text


@pytest.mark.parametrize(
    ("saturation", "rank", "expected"),
    [
        (0.49, 1.0, "xxxxxxxxxxxx"),
        (0.55, 1.0, "xxxxxxxxxxxx"),
        (0.7, 1.0, ".x.x.x.x.x.x"),
        (0.75, 0.5, "..x..x..x..x"),
        (0.75, 0.25, "xxxxxxxxxxxx"),
        (0.8, 1.0, "...x...x...x"),
        (0.999, 0.0, "xxxxxxxxxxxx"),
        (1.0, 0.0, "............"),
        (1.0, 1.0, "............"),
    ],
)
def test_fuller_pods_give_fewer_turns(saturation: float, rank: float, expected: str) -> None:
    assert turns(saturation, rank) == expected


def test_bands_at_their_ceilings_share_their_turns() -> None:
    reflection = ReflectiveCeilings()
    for _ in range(20):
        reflection.admitted(0.8, 0.0)
        assert reflection.is_open(0.8, 0.5, 0.0) is reflection.is_open(0.8, 1.0, 0.0)


def test_a_millisecond_is_a_turn_and_an_unused_turn_lasts_until_the_next_admission() -> None:
    reflection = ReflectiveCeilings()
    reflection.admitted(0.8, 0.0)
    opened = [reflection.is_open(0.8, 1.0, milliseconds / 1000) for milliseconds in range(6)]
    assert opened == [False, False, False, True, True, True]
    reflection.admitted(0.8, 0.006)
    assert not reflection.is_open(0.8, 1.0, 0.006)
