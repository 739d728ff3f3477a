"""What share of its time a pod spends on prompts."""

from __future__ import annotations

import pytest

from proxy.core.endpoint import Endpoint
from proxy.latency.transfer import MOST, PrefillShare, TransferModel


def busy(seconds: float, prefill_share: PrefillShare, pod: Endpoint, share: float) -> None:
    """Half a second of prompts now and then, so that it is this share."""
    now = 0.0
    while now < seconds:
        prefill_share.add(pod, 0.5, now)
        now += 0.5 / share


@pytest.mark.parametrize("seconds", [4.0, 10.0, 100.0])
def test_the_share_is_correct_from_the_first_seconds_on(seconds: float) -> None:
    """What a proxy has not seen, because it has just begun, is not taken for idleness."""
    prefill_share, pod = PrefillShare(), Endpoint("p")
    busy(seconds, prefill_share, pod, 0.5)
    assert prefill_share.of(pod, seconds) == pytest.approx(0.5, abs=0.06)


def test_one_early_prompt_does_not_dominate() -> None:
    prefill_share, pod = PrefillShare(), Endpoint("p")
    prefill_share.add(pod, 0.3, 0.0)
    assert prefill_share.of(pod, 0.0) == pytest.approx(0.3, abs=0.02)


def test_a_pod_that_only_computes_prompts_still_decodes() -> None:
    prefill_share, pod = PrefillShare(), Endpoint("p")
    busy(20.0, prefill_share, pod, 2.0)
    assert prefill_share.of(pod, 20.0) == MOST


def test_old_observations_are_dropped_and_removed_pods_at_once() -> None:
    prefill_share, pod = PrefillShare(), Endpoint("p")
    busy(20.0, prefill_share, pod, 0.8)
    assert prefill_share.of(pod, 25.0) > 0.3
    assert prefill_share.of(pod, 80.0) < 0.01
    prefill_share.forget(pod)
    assert prefill_share.of(pod, 20.0) == 0.0


def test_a_transfer_is_predicted_by_its_given_terms_until_observations_replace_them() -> None:
    transfer = TransferModel(fixed=0.02, per_token=1e-5)
    assert transfer.seconds(1000) == pytest.approx(0.03)
    for tokens in (500, 8000, 2000) * 100:
        transfer.observe(tokens, 0.05 + 4e-5 * tokens)
    assert transfer.seconds(4000) == pytest.approx(0.21, rel=0.05)
