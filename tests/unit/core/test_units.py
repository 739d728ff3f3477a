"""Durations and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.params import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("15s", 15),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("2d", 172800),
        ("10us", 1e-5),
        ("0", 0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "1h30", "5sec", "fast"])
def test_an_invalid_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="write 250ms, 15s, 5m, 1h30m or 7d"):
        parse_duration(text)


def test_a_duration_with_a_space_or_a_minus_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="'5 s' is not a duration; write 5s"):
        parse_duration("5 s")
    with pytest.raises(ValueError, match="a duration is not negative"):
        parse_duration("-5s")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 << 20),
        ("10Gi", 10 << 30),
        ("1k", 1000),
        ("1K", 1000),
        ("2M", 2_000_000),
        ("7", 7),
        ("1.5KiB", 1536),
        ("1e3", 1000),
        ("1.5E6", 1_500_000),
        ("5E", 5 * 10**18),
        ("2Ei", 2 << 60),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1Xi", "1 2", "1e999", "1e3k3"])
def test_an_invalid_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="64MiB"):
        parse_size(text)


@given(st.integers(0, 10**6), st.integers(0, 59), st.integers(0, 999))
def test_parts_of_a_duration_add_up(hours: int, minutes: int, millis: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{millis}ms") == pytest.approx(hours * 3600 + minutes * 60 + millis / 1000)
