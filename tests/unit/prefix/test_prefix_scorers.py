from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision, ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import Invalid
from proxy.core.plugin import Scorer
from proxy.core.registry import make_plugin
from proxy.core.request import InferenceRequest
from proxy.core.state import PluginState
from proxy.plugins.scorers.no_hit_lru import NoHitLruScorer
from proxy.plugins.scorers.prefix_cache import PrefixCacheScorer
from proxy.prefix.match import PREFIX_MATCH, PrefixMatch

RUN = ProfileRun("default")
PODS = [Endpoint(f"pod-{number}") for number in range(4)]


@dataclass(frozen=True)
class Held(PrefixMatch):
    """An existing match."""

    blocks: dict[Endpoint, int]
    total: int
    block_size: int = 64

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [self.blocks.get(endpoint, 0) for endpoint in endpoints]


def ask(*blocks: int, total: int = 10, producer: str = "p") -> InferenceRequest:
    request = InferenceRequest("id", "/v1/completions", "m")
    request.state.write(PREFIX_MATCH.of(producer), Held(dict(zip(PODS, blocks, strict=False)), total))
    return request


UNKNOWN = InferenceRequest("id", "/v1/completions", "m")


def prefix_scorer(**parameters: Any) -> PrefixCacheScorer:
    made = make_plugin(PrefixCacheScorer, parameters, "s", {})
    assert isinstance(made, PrefixCacheScorer)
    return made


def test_by_default_the_score_is_the_matched_share_of_the_prompt() -> None:
    assert prefix_scorer().score(RUN, ask(0, 5, 10), PODS[:3]) == pytest.approx([0, 0.5, 1])


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 1), st.integers(1, 100_000))
def test_matched_length_and_ratio_are_weighted(blocks: int, total: int, weight: float, scale: int) -> None:
    blocks = min(blocks, total)
    scorer = PrefixCacheScorer(weight, scale)
    (score,) = scorer.score(RUN, ask(blocks, total=total), PODS[:1])
    length = min(1, blocks * 64 / scale) ** 2
    assert score == pytest.approx(weight * length + (1 - weight) * blocks / total)
    assert 0 <= score <= 1 + 1e-12


@pytest.mark.parametrize("request_", [UNKNOWN, ask(3, 4, total=0)])
def test_without_a_match_all_score_0(request_: InferenceRequest) -> None:
    assert prefix_scorer().score(RUN, request_, PODS) == [0.0] * 4


@pytest.mark.parametrize("parameters", [{"matchLengthWeight": 1.1}, {"matchLengthScaleTokens": 0}])
def test_parameters_have_bounds(parameters: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        prefix_scorer(**parameters)


@pytest.mark.parametrize("cls", [PrefixCacheScorer, NoHitLruScorer])
def test_a_scorer_reads_the_producer_it_is_bound_to(cls: type[Scorer]) -> None:
    ports = {PluginState: PluginState()}
    bound = make_plugin(cls, {"prefixMatchInfoProducerName": "q"}, "s", ports)
    assert bound.requires == (PREFIX_MATCH.of("q"),)
    assert make_plugin(cls, {}, "s", ports).requires == (PREFIX_MATCH,)
    assert isinstance(bound, PrefixCacheScorer | NoHitLruScorer)
    assert bound.score(RUN, ask(10, producer="p"), PODS[:2]) == bound.score(RUN, UNKNOWN, PODS[:2])
    assert bound.score(RUN, ask(10, producer="q"), PODS[:2]) != bound.score(RUN, UNKNOWN, PODS[:2])


def send(scorer: NoHitLruScorer, request: InferenceRequest, endpoint: Endpoint) -> None:
    decision = Decision(endpoint, tuple(other for other in PODS if other is not endpoint))
    scorer.pre_request(Attempt(request, decision, endpoint, 0, 0.0), endpoint)


def no_hit(*used: Endpoint, size: int = 1024) -> NoHitLruScorer:
    scorer = NoHitLruScorer(PluginState(), size)
    for endpoint in used:
        send(scorer, ask(0), endpoint)
    return scorer


def test_a_hit_anywhere_makes_all_equal() -> None:
    assert no_hit(PODS[0]).score(RUN, ask(0, 0, 1), PODS) == [0.5] * 4


def test_the_only_endpoint_scores_1_for_a_cold_prompt() -> None:
    assert no_hit(PODS[0]).score(RUN, ask(0), PODS[:1]) == [1.0]


def test_endpoints_that_never_got_a_cold_prompt_rank_in_their_order() -> None:
    assert no_hit().score(RUN, ask(0), PODS) == pytest.approx([1, 2 / 3, 1 / 3, 0])


def test_used_endpoints_rank_by_the_time_of_their_last_use() -> None:
    scorer = no_hit(PODS[2], PODS[0])
    assert scorer.score(RUN, ask(0), PODS) == pytest.approx([0, 1, 1 / 3, 2 / 3])
    send(scorer, ask(0), PODS[2])
    assert scorer.score(RUN, ask(0), PODS) == pytest.approx([1 / 3, 1, 0, 2 / 3])


def test_only_the_order_of_the_candidates_counts() -> None:
    assert no_hit(*PODS).score(RUN, ask(0), [PODS[3], PODS[0]]) == [0.0, 1.0]
    assert no_hit(*PODS).score(RUN, ask(0), [PODS[3], PODS[1]]) == [0.0, 1.0], "two others, of another stage, are older"
    assert no_hit(*PODS).score(RUN, ask(0), [PODS[3], PODS[1], PODS[0]]) == [0.0, 0.5, 1.0]


def test_each_stage_of_a_cold_request_counts_for_its_own_pod() -> None:
    scorer, request, (prefill, other, decode, another) = no_hit(), ask(0), PODS
    answering = Attempt(request, Decision(decode, (another,), "decode", (prefill, other)), decode, 0, 0.0)
    computing = Attempt(request, Decision(prefill, (other,)), prefill, 0, 0.0)
    answering.stage, computing.stage = Stage.DECODE, Stage.PREFILL
    scorer.pre_request(answering, decode)
    scorer.pre_request(computing, prefill)
    assert scorer.score(RUN, ask(0), [prefill, other]) == [0.0, 1.0]
    assert scorer.score(RUN, ask(0), [decode, another]) == [0.0, 1.0]


def test_a_prompt_of_which_nothing_is_known_is_cold() -> None:
    scorer = no_hit()
    assert scorer.score(RUN, UNKNOWN, PODS[:2]) == [1.0, 0.0]
    send(scorer, UNKNOWN, PODS[0])
    assert scorer.score(RUN, UNKNOWN, PODS[:2]) == [0.0, 1.0], "such prompts alternate too"


def test_a_warm_request_does_not_change_the_lru() -> None:
    scorer = no_hit()
    send(scorer, ask(0, 3), PODS[0])
    assert scorer.score(RUN, ask(0), PODS[:2]) == [1.0, 0.0]


def test_scoring_does_not_change_the_lru() -> None:
    scorer = no_hit(PODS[0])
    assert scorer.score(RUN, ask(0), PODS) == scorer.score(RUN, ask(0), PODS)


def test_the_lru_is_bounded_and_drops_removed_endpoints() -> None:
    assert no_hit(PODS[0], PODS[1], size=1).score(RUN, ask(0), PODS[:2]) == [1.0, 0.0]
    assert no_hit(PODS[1], PODS[0], size=0).score(RUN, ask(0), PODS[:2]) == [0.0, 1.0], "not above 0 is the default"
    scorer = no_hit(PODS[0])
    assert scorer.score(RUN, ask(0), PODS[:2]) == [0.0, 1.0]
    scorer.endpoint_removed(PODS[0])
    assert scorer.score(RUN, ask(0), PODS[:2]) == [1.0, 0.0]
