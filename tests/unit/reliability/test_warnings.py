"""What `kvlane check` warns of."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core import params
from proxy.core.errors import ConfigError
from proxy.reliability.settings import ReliabilitySettings, warnings


def warned(pods: int = 3, **sections: Any) -> list[str]:
    return list(warnings(params.load(ReliabilitySettings, sections), [pods]))


@pytest.mark.parametrize("pods", [0, 1, 2, 50])
def test_the_defaults_have_no_warnings(pods: int) -> None:
    assert warned(pods) == []


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"timeouts": {"idle": "40m"}}, "timeouts.idle"),
        ({"timeouts": {"firstByte": "40m"}}, "timeouts.firstByte"),
        ({"timeouts": {"request": "1s", "idle": "500ms", "firstByte": "500ms", "connect": "1s"}}, "timeouts.connect"),
        ({"health": {"stall": "300s"}}, "health.stall"),
        ({"health": {"timeout": "30m"}}, "health.timeout"),
        ({"hedging": {"after": "10m"}}, "hedging.after"),
        ({"hedging": {"after": "300s"}}, "hedging.after"),
        ({"retries": {"backoff": {"initial": "2s"}}}, "retries.backoff.initial"),
        ({"continuation": {"models": ["*"]}, "retries": {"attempts": 1}}, "continuation.models"),
        ({"continuation": {"models": ["*"]}, "retries": {"on": ["connect"]}}, "continuation.models"),
        ({"breaker": {"panicPercent": 0}}, "breaker.panicPercent"),
        ({"breaker": {"panicPercent": 30}}, "breaker.panicPercent"),
    ],
)
def test_an_unreachable_threshold_is_warned_of(sections: dict[str, Any], path: str) -> None:
    assert any(warning.startswith(f"reliability.{path}: ") for warning in warned(**sections))


def test_a_path_of_health_checks_must_start_with_a_slash() -> None:
    with pytest.raises(ConfigError, match=r"health\.path: 'healthz' must start with /"):
        warned(health={"path": "healthz"})
