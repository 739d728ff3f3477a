"""In a large fleet some pods are scored: the pods with most of the prompt, and a sample of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest, Prompt
from proxy.plugins.filters.candidate_sampling import CandidateSamplingFilter
from proxy.prefix.match import PREFIX_MATCH, PrefixMatch

RUN = ProfileRun("default")


class Held(PrefixMatch):
    """So many blocks, by endpoint."""

    block_size, total = 64, 8

    def __init__(self, blocks: dict[str, int], otherwise: int = 0) -> None:
        self._blocks = blocks
        self._otherwise = otherwise

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [self._blocks.get(endpoint.name, self._otherwise) for endpoint in endpoints]


def fleet(pods: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{number}") for number in range(pods)]


def kept(pods: Sequence[Endpoint], match: PrefixMatch | None, most: int = 16, seed: int = 1) -> list[Endpoint]:
    request = InferenceRequest("id", "/v1/completions", "m", Prompt((b"text",)))
    if match is not None:
        request.state.write(PREFIX_MATCH, match)
    return list(CandidateSamplingFilter(Random(seed), most).filter(RUN, request, pods))


@pytest.mark.parametrize("pods", [1, 15, 16])
def test_a_small_fleet_is_scored_completely(pods: int) -> None:
    endpoints = fleet(pods)
    assert kept(endpoints, Held({})) == endpoints
    assert pods <= CandidateSamplingFilter(Random(), 16).keeps_up_to


def test_of_a_large_fleet_a_sample_without_repetition_is_scored() -> None:
    for seed in range(50):
        found = kept(fleet(200), Held({}), seed=seed)
        assert len(found) == len(set(found)) == 16


def test_pods_with_more_of_the_prefix_are_always_included() -> None:
    names = {"pod-7", "pod-150", "pod-199"}
    for seed in range(20):
        found = kept(fleet(200), Held(dict.fromkeys(names, 5)), seed=seed)
        assert names <= {endpoint.name for endpoint in found}


def test_a_common_system_prompt_leaves_places_to_longer_matches() -> None:
    for seed in range(20):
        found = kept(fleet(200), Held({"pod-3": 6}, otherwise=2), seed=seed)
        assert "pod-3" in {endpoint.name for endpoint in found}
        assert 15 <= len(found) <= 16


def test_of_many_matches_the_longest_are_kept_and_equal_ones_rotate() -> None:
    held = {f"pod-{number}": 3 for number in range(100)} | {"pod-150": 4}
    seen = Counter(endpoint.name for seed in range(400) for endpoint in kept(fleet(200), Held(held), seed=seed))
    assert seen["pod-150"] == 400
    assert all(seen[f"pod-{number}"] for number in range(100))


def test_without_matches_every_pod_has_its_turn() -> None:
    seen = Counter(endpoint.name for seed in range(400) for endpoint in kept(fleet(200), Held({}), seed=seed))
    assert len(seen) == 200


def test_without_a_producer_it_is_a_sample() -> None:
    assert len(kept(fleet(17), None)) == 16
