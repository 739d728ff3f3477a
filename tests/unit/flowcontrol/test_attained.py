"""What tenants have had, and for how long that counts."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.attempt import Attempt, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration
from proxy.core.request import InferenceRequest, Prompt
from proxy.flowcontrol.queue import AttainedService, tokens_of
from proxy.flowcontrol.settings import LeastService


def attempt(**seen: Any) -> Attempt:
    pod = Endpoint("a")
    attempt = Attempt(InferenceRequest("r", "/", "m", Prompt((b"x" * 400,))), Decision(pod), pod, 0, 0.0)
    for name, value in seen.items():
        setattr(attempt, name, value)
    return attempt


def test_half_of_the_service_remains_after_a_half_life() -> None:
    attained = AttainedService(LeastService())
    attained.add("a", 100, now=0.0)
    assert attained.had("a") == 100
    attained.add("b", 10, now=60.0)
    assert (attained.had("a"), attained.had("b"), attained.had("c")) == (50, 10, 0)
    attained.add("a", 10, now=120.0)
    assert (attained.had("a"), attained.had("b")) == (35, 5)


def test_without_a_half_life_all_service_counts() -> None:
    attained = AttainedService(LeastService(half_life=Duration(0.0)))
    for now in (0.0, 1000.0):
        attained.add("a", 100, now)
    assert attained.had("a") == 200


def test_tenants_without_recent_responses_are_dropped() -> None:
    attained = AttainedService(LeastService(half_life=Duration(0.0), forget_after=Duration(10.0)))
    attained.add("a", 100, now=0.0)
    attained.add("b", 100, now=5.0)
    attained.add("a", 1, now=9.0)
    attained.add("c", 1, now=16.0)
    assert [attained.had(tenant) for tenant in "abc"] == [101, 0, 1]
    attained.settings = LeastService(half_life=Duration(0.0), forget_after=Duration(0.0))
    attained.add("c", 1, now=1e6)
    assert attained.had("a") == 101


@pytest.mark.parametrize(
    ("seen", "tokens"),
    [
        ({"status": 200, "usage": Usage(50, 20)}, 90),
        ({"status": 200, "chunks": 7}, 114),
        ({"status": 503}, 0),
        ({}, 0),
    ],
)
def test_a_response_token_counts_as_two_prompt_tokens(seen: Any, tokens: float) -> None:
    assert tokens_of([attempt(**seen)]) == tokens
