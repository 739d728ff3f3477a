"""What this proxy has in flight, exactly once in and out."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.core.request import OUTPUT_ESTIMATE, InferenceRequest, Prompt
from proxy.fleet.ledger import RECENT_SECONDS, Ledger, SharedLedger
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch


@dataclass(frozen=True)
class Cached(PrefixMatch):
    """Every pod holds this many blocks of 16 tokens."""

    blocks: int
    block_size: int = 16
    total: int = 100

    def matched(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        return [self.blocks] * len(endpoints)


def attempt(endpoint: Endpoint, tokens: int = 10, cached_blocks: int | None = None, output: int = 0) -> Attempt:
    request = InferenceRequest("r", "/v1/completions", "m", Prompt((b"x" * 4 * tokens,)))
    if cached_blocks is not None:
        request.state.write(PREFIX_MATCH, Cached(cached_blocks))
    if output:
        request.state.write(OUTPUT_ESTIMATE, output)
    return Attempt(request, Decision(endpoint), endpoint, 0, 0.0)


def counts(endpoint: Endpoint) -> tuple[int, int]:
    return endpoint.load.requests, endpoint.load.tokens


def test_an_attempt_counts_from_its_dispatch_to_its_end() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    dispatched = attempt(pod, tokens=100, cached_blocks=2, output=30)
    ledger.attempt_started(dispatched)
    assert counts(pod) == (1, 100 - 32 + 30)
    assert ledger.in_flight == 1
    ledger.first_byte(dispatched)
    assert counts(pod) == (1, 30)
    ledger.attempt_ended(dispatched)
    assert counts(pod) == (0, 0)
    assert ledger.in_flight == 0


def test_without_a_match_all_prompt_tokens_are_uncached() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    ledger.attempt_started(attempt(pod, tokens=100))
    assert pod.load.tokens == 100


def test_a_match_longer_than_the_prompt_leaves_nothing_to_prefill() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    ledger.attempt_started(attempt(pod, tokens=20, cached_blocks=5))
    assert pod.load.tokens == 0


def test_a_tokenized_prompt_counts_instead_of_the_estimate() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    dispatched = attempt(pod, tokens=100)
    dispatched.request.state.write(TOKENIZED_PROMPT, Prompt((b"1234" * 7,)))
    ledger.attempt_started(dispatched)
    assert pod.load.tokens == 7


def test_repeated_calls_change_nothing() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    dispatched = attempt(pod)
    ledger.attempt_started(dispatched)
    ledger.attempt_started(dispatched)
    assert counts(pod) == (1, 10)
    ledger.first_byte(dispatched)
    ledger.first_byte(dispatched)
    ledger.attempt_ended(dispatched)
    ledger.attempt_ended(dispatched)
    ledger.first_byte(dispatched)
    assert counts(pod) == (0, 0)


def test_an_ended_attempt_does_not_enter_again() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    dispatched = attempt(pod)
    ledger.attempt_started(dispatched)
    dispatched.ending = Ending.COMPLETE
    ledger.attempt_ended(dispatched)
    ledger.attempt_started(dispatched)
    assert counts(pod) == (0, 0)


def test_an_attempt_that_never_entered_does_not_leave() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    dispatched = attempt(pod)
    ledger.first_byte(dispatched)
    ledger.attempt_ended(dispatched)
    assert counts(pod) == (0, 0)


def test_a_pod_that_was_removed_and_returned_has_no_old_load() -> None:
    ledger, old, new = Ledger(ManualClock()), Endpoint("a"), Endpoint("a")
    dispatched = attempt(old)
    ledger.attempt_started(dispatched)
    ledger.attempt_ended(dispatched)
    assert counts(old) == (0, 0)
    assert counts(new) == (0, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from(["attempt_started", "first_byte", "attempt_ended"])), max_size=80
    )
)
def test_any_interleaving_stays_above_zero_and_returns_to_it(steps: list[tuple[int, str]]) -> None:
    ledger, pods = Ledger(ManualClock()), [Endpoint("a"), Endpoint("b", weight=3)]
    attempts = [attempt(pods[n % 2], tokens=n * 7, cached_blocks=n if n % 3 else None, output=n) for n in range(6)]
    for number, call in steps:
        getattr(ledger, call)(attempts[number])
        for pod in pods:
            assert min(counts(pod)) >= 0
            assert pod.view.running == pod.load.requests
    for dispatched in attempts:
        ledger.attempt_ended(dispatched)
    for pod in pods:
        assert counts(pod) == (0, 0)
    assert ledger.in_flight == 0


def test_recent_work_is_the_log_of_work_per_weight_that_decays() -> None:
    clock = ManualClock()
    ledger, pod = Ledger(clock), Endpoint("a", weight=2.0)
    ledger.attempt_started(attempt(pod, tokens=9))
    clock.advance(RECENT_SECONDS)
    ledger.attempt_started(attempt(pod, tokens=19))
    decayed = math.exp(pod.load.recent - clock.now() / RECENT_SECONDS)
    assert decayed == pytest.approx(10 / 2 / math.e + 20 / 2)


def test_recent_work_is_stable_after_years_of_uptime() -> None:
    clock = ManualClock(now=3e8)
    ledger, busy, idle = Ledger(clock), Endpoint("busy"), Endpoint("idle")
    ledger.attempt_started(attempt(busy))
    ledger.attempt_started(attempt(idle))
    before = busy.load.recent
    ledger.attempt_started(attempt(busy))
    assert math.isfinite(busy.load.recent)
    assert busy.load.recent > before == idle.load.recent


@pytest.mark.parametrize("gap", [0.0, 0.01, 1.0])
def test_weights_of_three_to_one_give_traffic_of_three_to_one_when_ties_go_to_the_least_recent(gap: float) -> None:
    clock, rng = ManualClock(), random.Random(1)
    ledger, pods = Ledger(clock), [Endpoint("a", weight=3.0), Endpoint("b", weight=1.0)]
    picks: Counter[str] = Counter()
    for _ in range(4000):
        target = min(pods, key=lambda pod: (pod.load.recent, rng.random()))
        dispatched = attempt(target)
        ledger.attempt_started(dispatched)
        ledger.attempt_ended(dispatched)
        picks[target.name] += 1
        clock.advance(gap)
    assert picks["a"] / picks["b"] == pytest.approx(3.0, rel=0.02)


def test_a_pod_that_joins_does_not_get_all_the_traffic() -> None:
    clock = ManualClock()
    ledger, pods = Ledger(clock), [Endpoint("a"), Endpoint("b"), Endpoint("c")]
    for dispatched in [attempt(pod) for pod in pods[:2] for _ in range(100)]:
        ledger.attempt_started(dispatched)
    ledger.level(pods[2], pods)
    picks: Counter[str] = Counter()
    for _ in range(300):
        target = min(pods, key=lambda pod: pod.load.recent)
        ledger.attempt_started(attempt(target))
        picks[target.name] += 1
    assert picks["c"] == pytest.approx(100, abs=2)


def test_a_pod_that_joins_alone_stays_without_a_past() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    ledger.level(pod, [pod])
    assert pod.load.recent == -math.inf


def test_load_of_siblings_is_part_of_the_load_and_replaced_completely() -> None:
    ledger, pod = Ledger(ManualClock()), Endpoint("a")
    ledger.attempt_started(attempt(pod, tokens=10))
    ledger.elsewhere(pod, 5, 500, work=600)
    assert counts(pod) == (6, 510)
    ledger.elsewhere(pod, 2, 100)
    assert counts(pod) == (3, 110)
    ledger.elsewhere(pod, 0, 0)
    assert counts(pod) == (1, 10)
    assert pod.load.recent > math.log(600)


def test_a_shared_ledger_publishes_each_change_once() -> None:
    published: list[tuple[str, int]] = []
    ledger = SharedLedger(
        ManualClock(),
        lambda endpoint, work: published.append((endpoint.name, work)),
        lambda endpoint: published.append((endpoint.name, 0)),
    )
    pod = Endpoint("a")
    dispatched = attempt(pod, tokens=10)
    ledger.attempt_started(dispatched)
    ledger.attempt_started(dispatched)
    ledger.first_byte(dispatched)
    ledger.attempt_ended(dispatched)
    assert published == [("a", 11), ("a", 0), ("a", 0)]
    assert counts(pod) == (0, 0)
