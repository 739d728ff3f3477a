"""Whether a prompt is computed by another pod than the decode pod."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending, Stage
from proxy.core.decision import Decision
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import PluginState, State
from proxy.latency.forecast import LATENCY, STAGE_COST
from proxy.latency.transfer import TransferModel
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT
from tests.helpers.plugins.situations import RUN, Foretold, Held, attempt, fault, make, pod, request

DECODE, PREFILL, OTHER = pod("decode"), pod("prefill"), pod("other")


def request_with(tokens: int, cached: int = 0, **state: Any) -> InferenceRequest:
    """Cached are so many on the decode pod, in blocks of 16."""
    incoming = request(tokens)
    incoming.state.write(PREFIX_MATCH, Held(tokens // 16, {"decode": cached // 16}))
    return incoming


def test_always_is_always() -> None:
    decider = make("always-disagg-pd-decider")
    assert decider.wants(request(0), DECODE)
    assert decider.confirms(request(0), DECODE, [PREFILL])


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ({"type": "image_url", "image_url": {"url": "data:"}}, True),
        ({"type": "input_audio", "input_audio": {}}, True),
        ({"type": "video_url", "video_url": {}}, True),
        ({"type": "text", "text": "hello"}, False),
        ({"type": "text", "text": json.dumps({"type": "image_url"})}, False),
    ],
)
def test_requests_with_media_are_encoded_separately(part: Mapping[str, Any], wanted: bool) -> None:
    decider = make("always-disagg-multimodal-decider")
    for indent in (None, 2):
        body = json.dumps({"messages": [{"role": "user", "content": [part]}]}, indent=indent).encode()
        assert decider.wants(replace(request(), body=body), DECODE) is wanted


class TestPrefixBased:
    @pytest.mark.parametrize(
        ("tokens", "cached", "wanted"),
        [(512, 0, True), (511, 0, False), (1024, 512, True), (1024, 528, False), (5000, 4992, False), (16, 160, False)],
    )
    def test_the_missing_tokens_must_reach_the_threshold(self, tokens: int, cached: int, wanted: bool) -> None:
        decider = make("prefix-based-pd-decider", nonCachedTokens=512)
        assert decider.wants(request_with(tokens, cached), DECODE) is wanted

    def test_zero_missing_tokens_are_never_enough(self) -> None:
        assert not make("prefix-based-pd-decider").wants(request_with(10_000), DECODE)

    def test_a_short_prompt_is_not_split(self) -> None:
        decider = make("prefix-based-pd-decider", nonCachedTokens=16, promptTokens=1000)
        assert not decider.wants(request_with(999), DECODE)
        assert decider.wants(request_with(1000), DECODE)

    def test_without_a_prefix_match_it_does_not_split(self) -> None:
        assert not make("prefix-based-pd-decider", nonCachedTokens=16).wants(request(1000), DECODE)

    def test_a_tokenized_prompt_counts_by_its_tokens(self) -> None:
        incoming = request_with(1000)
        incoming.state.write(TOKENIZED_PROMPT, Prompt((bytes(400),)))
        assert not make("prefix-based-pd-decider", nonCachedTokens=512).wants(incoming, DECODE)

    @pytest.mark.parametrize("name", ["nonCachedTokens", "promptTokens"])
    def test_there_are_no_negative_tokens(self, name: str) -> None:
        assert "at least 0" in fault("prefix-based-pd-decider", **{name: -1})

    def test_it_reads_the_producer_it_is_bound_to(self) -> None:
        decider = make("prefix-based-pd-decider", nonCachedTokens=16, prefixMatchInfoProducerName="other")
        assert decider.requires == (PREFIX_MATCH.of("other"),)
        assert not decider.wants(request_with(1000), DECODE)


class TestPredictedLatency:
    """A transfer of 1,000 tokens takes 0.03 s unless something else was learnt."""

    def verdict(
        self,
        seconds: Mapping[str, float],
        delays: Mapping[str, float] | None = None,
        tokens: int = 1000,
        cached: int = 0,
        **given: Any,
    ) -> str:
        """How far the question comes: nowhere, to the prefill profile, or to another pod."""
        decider, incoming = make("predicted-latency-pd-decider", **given), request_with(tokens, cached)
        incoming.state.write(LATENCY, Foretold(seconds, delays=delays, paces={}))
        if not decider.wants(incoming, DECODE):
            return "local"
        return "remote" if decider.prefers(incoming, DECODE, DECODE, [PREFILL, OTHER]) else "local after all"

    def test_the_cheaper_option_is_chosen_including_the_transfer(self) -> None:
        assert self.verdict({"decode": 0.5, "prefill": 0.4}) == "remote"
        assert self.verdict({"decode": 0.5, "prefill": 0.48}) == "local after all"

    def test_a_transfer_that_costs_too_much_is_skipped_before_the_search(self) -> None:
        assert self.verdict({"decode": 0.02, "prefill": 0.0}) == "local"

    def test_delayed_responses_count(self) -> None:
        calm = {"decode": 0.1, "prefill": 0.2}
        assert self.verdict(calm) == "local after all"
        assert self.verdict(calm, delays={"decode": 0.5}) == "remote"
        assert self.verdict(calm, delays={"decode": 0.3}, interferenceCost=1.0) == "remote"
        assert self.verdict(calm, delays={"decode": 0.5, "prefill": 0.5}) == "local after all"
        assert self.verdict(calm, delays={"decode": 0.5}, interferenceCost=0.1) == "local after all"

    def test_only_blocks_that_the_decode_pod_lacks_are_transferred(self) -> None:
        near = {"decode": 0.5, "prefill": 0.46}
        assert self.verdict(near, tokens=4000) == "local after all"
        assert self.verdict(near, tokens=4000, cached=3200) == "remote"
        assert self.verdict({"decode": 9.0, "prefill": 0.0}, tokens=1600, cached=1600) == "local"

    def test_the_best_ranked_pods_are_compared(self) -> None:
        assert self.verdict({"decode": 0.5, "prefill": 0.6, "other": 0.1}) == "local after all"

    def test_without_a_prediction_one_pod_serves_the_request(self) -> None:
        decider = make("predicted-latency-pd-decider")
        assert not decider.wants(request(10_000), DECODE)
        assert not decider.prefers(request(10_000), DECODE, OTHER, [PREFILL])

    def test_the_removed_number_of_tokens_is_reported_with_its_replacement(self) -> None:
        found = fault("predicted-latency-pd-decider", nonCachedTokens=512)
        assert "nonCachedTokens: was removed" in found
        assert "prefix-based-pd-decider" in found

    def test_a_faster_decode_pod_is_worth_a_transfer(self) -> None:
        """100 tokens at 10 ms are a second, half of it counts; the transfer of 1,000 takes 30 ms."""
        for pace, preferred in ((0.0, True), (9.3e-3, True), (9.5e-3, False)):
            decider, incoming = make("predicted-latency-pd-decider"), request_with(1000)
            paces = {"decode": 10e-3, "other": pace}
            incoming.state.write(LATENCY, Foretold({"decode": 0.1, "prefill": 0.1}, paces=paces, output=100.0))
            assert decider.prefers(incoming, DECODE, OTHER, [DECODE]) is preferred

    def test_responses_are_slower_where_prompts_were_recent(self) -> None:
        decider, incoming = make("predicted-latency-pd-decider"), request_with(1000)
        forecast = Foretold({}, paces={"decode": 10e-3, "other": 10e-3}, output=100.0)
        incoming.state.write(LATENCY, forecast)
        decider.decode_cost(forecast, incoming, OTHER)
        decider.clock.advance(1_000.0)
        sent = attempt(incoming, OTHER, profile="decode")
        sent.charge = (5_000, 0)  # 5 s of work, in a window of 10 s, all of it observed
        decider.pre_request(sent, OTHER)
        idle, busy = (decider.decode_cost(forecast, incoming, pod) - 0.03 for pod in (DECODE, OTHER))
        assert (idle, busy) == (pytest.approx(0.5), pytest.approx(1.0))
        decider.endpoint_removed(OTHER)
        assert decider.decode_cost(forecast, incoming, OTHER) == pytest.approx(0.53)

    def test_scorers_get_the_cost_of_the_stage_only_during_its_profile(self) -> None:
        decider, incoming = make("predicted-latency-pd-decider"), request_with(1000, cached=960)
        delays, paces = {"prefill": 0.5}, {"decode": 20e-3, "other": 10e-3}
        seconds = {"decode": 0.2, "prefill": 0.1, "other": 0.4}
        incoming.state.write(LATENCY, Foretold(seconds, delays=delays, paces=paces, output=10.0))
        with decider.pricing(incoming, Stage.PREFILL):
            assert [*map(incoming.state[STAGE_COST], (DECODE, PREFILL, OTHER))] == pytest.approx([0.2, 0.3, 0.4])
        with decider.pricing(incoming, Stage.DECODE):
            costs = [*map(incoming.state[STAGE_COST], (DECODE, OTHER))]
            assert costs == pytest.approx([0.01 + 40 * 2e-5 + 0.1, 0.01 + 1000 * 2e-5 + 0.05])
            assert make("latency-scorer").score(RUN, incoming, [DECODE, OTHER]) == [pytest.approx(1 / 1.0308), 1.0]
        assert incoming.state.read(STAGE_COST) is None

    def test_it_declares_the_data_that_it_reads(self) -> None:
        bound: dict[str, Any] = {"prefixMatchInfoProducerName": "p", "latencyPredictionInfoProducerName": "l"}
        assert make("predicted-latency-pd-decider", **bound).requires == (PREFIX_MATCH.of("p"), LATENCY.of("l"))


class TestTransferTimes:
    def split(self, decider: Any, tokens: int, seconds: float, **changes: Any) -> None:
        """A request whose prompt is ready after 1 s, and whose response begins `seconds` later."""
        incoming = replace(request_with(tokens), stream=changes.get("stream", True))
        answering = attempt(incoming, DECODE, profile="decode")
        computing = Attempt(replace(incoming, stream=False), Decision(PREFILL), PREFILL, 0, 0.0)
        answering.stage, computing.stage = Stage.DECODE, Stage.PREFILL
        decider.pre_request(answering, DECODE)
        decider.pre_request(computing, PREFILL)
        computing.status, computing.last_byte_at, computing.ending = 200, changes.get("ready", 1.0), Ending.COMPLETE
        decider.post_response(computing, PREFILL)
        answering.stage = changes.get("stage", Stage.DECODE)
        answering.status, answering.ending = changes.get("status", 200), changes.get("ending", Ending.COMPLETE)
        answering.first_byte_at = changes.get("begun", 1.0 + seconds)
        decider.post_response(answering, DECODE)

    def test_transfers_are_learnt_from_streams(self) -> None:
        decider = make("predicted-latency-pd-decider")
        assert decider.transfer.seconds(1000) == pytest.approx(0.03)
        for tokens in (500, 4000, 1000, 8000) * 20:
            self.split(decider, tokens, 0.05 + tokens * 1e-4)
        assert decider.transfer.seconds(2000) == pytest.approx(0.25, rel=0.05)
        assert decider.transfer.seconds(0) == pytest.approx(0.05, abs=0.02)

    @pytest.mark.parametrize(
        "changes",
        [
            {"stream": False},
            {"status": 500},
            {"ending": Ending.UPSTREAM_FAILED},
            {"begun": None},
            {"ready": None},
            {"stage": Stage.WHOLE},
        ],
        ids=str,
    )
    def test_uninformative_responses_are_not_learnt_from(self, changes: Mapping[str, Any]) -> None:
        decider = make("predicted-latency-pd-decider")
        self.split(decider, 1000, 5.0, **changes)
        assert decider.transfer.seconds(1000) == pytest.approx(0.03)

    def test_a_response_without_a_prefill_attempt_shows_no_transfer(self) -> None:
        decider, answering = (
            make("predicted-latency-pd-decider"),
            attempt(replace(request_with(9), stream=True), DECODE),
        )
        answering.stage, answering.first_byte_at = Stage.DECODE, 1.0
        answering.status, answering.ending = 200, Ending.COMPLETE
        decider.post_response(answering, DECODE)
        assert decider.transfer.seconds(1000) == pytest.approx(0.03)

    def test_an_outlier_changes_little(self) -> None:
        transfer = TransferModel(0.01, 2e-5)
        for _ in range(30):
            transfer.observe(1000, 0.03)
        transfer.observe(1000, 6.0)
        assert transfer.seconds(1000) < 0.05

    def test_a_successor_keeps_learnt_terms_unless_configured(self) -> None:
        state = State()
        draft = state.draft()
        old = make("predicted-latency-pd-decider", state=PluginState(draft))
        draft.commit()
        old.transfer.observe(1000, 0.5)
        same = make("predicted-latency-pd-decider", state=PluginState(state.draft()), answerCost=0.1)
        successor = make("predicted-latency-pd-decider", state=PluginState(state.draft()), transferSeconds=0.2)
        assert same.transfer is old.transfer
        assert same.prefill_share is successor.prefill_share is old.prefill_share
        assert successor.transfer.seconds(0) == pytest.approx(0.2)
