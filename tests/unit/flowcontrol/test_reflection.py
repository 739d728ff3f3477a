"""How often a band has its turn."""

from __future__ import annotations

import pytest

from proxy.flowcontrol.capacity import ReflectiveCeilings


def turns(saturation: float, rank: float) -> str:
    reflection = ReflectiveCeilings()
    text = ""
    for _ in range(12):
        reflection.turn(saturation)
        text += "x" if reflection.is_open(saturation, rank) else "."
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
        reflection.turn(0.8)
        assert reflection.is_open(0.8, 0.5) is reflection.is_open(0.8, 1.0)
