"""predicted-latency-producer and latency-scorer, together as they are used."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH
from tests.helpers.examples import examples
from tests.helpers.plugins.situations import RUN, Held, attempt, fault, make, pod, request

STEP = 0.01
PER_TOKEN = 100e-6


class Fleet:
    """Pods that compute prompts one after the other, and what the proxy makes of it."""

    def __init__(self, *names: str, slow: float = 1.0, says_usage: bool = True, **parameters: Any) -> None:
        """The first pod is `slow` times slower."""
        self._says_usage = says_usage
        self.clock = ManualClock()
        self.producer = make("predicted-latency-producer", clock=self.clock, **parameters)
        self.scorer = make("latency-scorer")
        self.pods = [pod(name) for name in names]
        self._slow = slow
        self._free = dict.fromkeys(self.pods, 0.0)
        self._live: list[tuple[float, Attempt]] = []

    async def scores(self, incoming: InferenceRequest) -> dict[str, float]:
        await self.producer.produce(incoming, self.pods)
        return dict(zip((one.name for one in self.pods), self.scorer.score(RUN, incoming, self.pods), strict=True))

    def send(self, incoming: InferenceRequest, target: Endpoint, cached: int = 0) -> None:
        dispatched = attempt(incoming, target)
        dispatched.started_at = self.clock.now()
        uncached = incoming.prompt.tokens - cached
        dispatched.charge = (uncached, 0)
        target.charge(1, uncached)
        self.producer.pre_request(dispatched, target)
        seconds = (STEP + uncached * PER_TOKEN) * (self._slow if target is self.pods[0] else 1.0)
        self._free[target] = max(self._free[target], self.clock.now()) + seconds
        self._live.append((self._free[target], dispatched))

    def advance(self, seconds: float) -> None:
        """Responses end with their first token."""
        until = self.clock.now() + seconds
        self._live.sort(key=lambda one: one[0])
        while self._live and self._live[0][0] <= until:
            at, dispatched = self._live.pop(0)
            self.clock.advance(max(0.0, at - self.clock.now()))
            dispatched.status, dispatched.first_byte_at = 200, at
            dispatched.last_byte_at, dispatched.ending = at, Ending.COMPLETE
            dispatched.usage = Usage(dispatched.request.prompt.tokens, 1) if self._says_usage else None
            assert dispatched.charge is not None
            dispatched.endpoint.charge(-1, -dispatched.charge[0])
            self.producer.post_response(dispatched, dispatched.endpoint)
        self.clock.advance(until - self.clock.now())

    async def learn(self, times: int = 40) -> None:
        for at in range(times):
            for target in self.pods:
                incoming = streamed(500 + 397 * at % 4000)
                await self.scores(incoming)
                self.send(incoming, target)
            self.advance(2.0)

    async def best(self, incoming: InferenceRequest) -> str:
        found = await self.scores(incoming)
        return max(found, key=found.__getitem__)


def streamed(tokens: int, held: dict[str, int] | None = None, **headers: str) -> InferenceRequest:
    """`held` are the cached tokens by pod."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    incoming = replace(request(tokens), stream=True, headers=named)
    blocks = {name: count // 16 for name, count in (held or {}).items()}
    incoming.state.write(PREFIX_MATCH, Held(tokens // 16, blocks))
    return incoming


async def test_a_prompt_goes_where_it_is_cached() -> None:
    fleet = Fleet("a", "b", "c")
    await fleet.learn()
    assert await fleet.best(streamed(4096, {"b": 2048})) == "b"


async def test_affinity_yields_when_the_queue_costs_more_than_the_cache_saves() -> None:
    fleet = Fleet("a", "b")
    await fleet.learn()
    incoming = streamed(4096, {"b": 2048})
    fleet.send(streamed(1000), fleet.pods[1])
    assert await fleet.best(streamed(4096, {"b": 2048})) == "b"
    fleet.send(streamed(4000), fleet.pods[1])
    assert await fleet.best(incoming) == "a"


async def test_finished_work_does_not_count() -> None:
    fleet = Fleet("a", "b")
    await fleet.learn()
    fleet.send(streamed(4000), fleet.pods[1])
    fleet.advance(0.35)
    assert await fleet.best(streamed(4096, {"b": 2048})) == "b"


async def test_a_burst_spreads_before_any_response() -> None:
    fleet = Fleet("a", "b", "c", "d")
    sent = dict.fromkeys("abcd", 0)
    for _ in range(64):
        incoming = streamed(1000)
        name = await fleet.best(incoming)
        sent[name] += 1
        fleet.send(incoming, next(one for one in fleet.pods if one.name == name))
    assert set(sent.values()) == {16}


async def test_the_first_response_changes_the_costs_of_all_pods_without_one() -> None:
    fleet = Fleet("a", "b")
    await fleet.learn()
    dispatched = attempt(streamed(1000), fleet.pods[0])
    dispatched.started_at, dispatched.charge = fleet.clock.now(), (1000, 0)
    fleet.producer.pre_request(dispatched, fleet.pods[0])
    fleet.clock.advance(0.11)
    dispatched.status, dispatched.first_byte_at = 200, fleet.clock.now()
    await fleet.scores(streamed(1000))
    fleet.clock.advance(0.1)
    dispatched.ending, dispatched.last_byte_at, dispatched.usage = Ending.COMPLETE, fleet.clock.now(), Usage(1000, 100)
    fleet.producer.post_response(dispatched, fleet.pods[0])
    incoming = streamed(1000)
    await fleet.scores(incoming)
    used, other = incoming.state[LATENCY].costs(fleet.pods)
    assert other == pytest.approx(used, rel=0.1)


async def test_a_pod_three_times_slower_gets_less_without_configuration() -> None:
    fleet = Fleet("slow", "quick", slow=3.0)
    await fleet.learn()
    assert await fleet.best(streamed(4096)) == "quick"
    fleet.send(streamed(4000), fleet.pods[1])
    assert await fleet.best(streamed(4096)) == "quick"
    fleet.send(streamed(7000), fleet.pods[1])
    assert await fleet.best(streamed(4096)) == "slow"


async def test_almost_equal_costs_are_equal() -> None:
    fleet = Fleet("a", "b")
    assert await fleet.scores(streamed(100)) == {"a": 1.0, "b": 1.0}
    fleet.send(streamed(1), fleet.pods[0])
    assert (await fleet.scores(streamed(100)))["b"] == 1.0


async def test_a_removed_pod_is_dropped_and_its_last_response_is_harmless() -> None:
    fleet = Fleet("a", "b")
    await fleet.learn(5)
    fleet.send(streamed(4000), fleet.pods[0])
    fleet.producer.endpoint_removed(fleet.pods[0])
    fleet.advance(2.0)
    assert (await fleet.scores(streamed(100))).keys() == {"a", "b"}
    assert fleet.pods[0].load.requests == 0


async def test_a_pod_unknown_to_the_producer_is_scored() -> None:
    fleet = Fleet("a")
    dispatched = attempt(streamed(10), fleet.pods[0])
    fleet.producer.pre_request(dispatched, fleet.pods[0])
    fleet.producer.post_response(dispatched, fleet.pods[0])


async def test_a_pod_added_during_preparation_is_scored() -> None:
    fleet = Fleet("a")
    await fleet.learn(5)
    incoming = streamed(1000)
    await fleet.producer.produce(incoming, fleet.pods)
    fleet.pods.append(pod("b"))
    fleet.producer.endpoint_removed(fleet.pods[0])
    assert fleet.scorer.score(RUN, incoming, fleet.pods) == [1.0, 1.0]


async def test_a_sent_request_is_in_the_next_prediction_though_both_were_prepared_before() -> None:
    fleet = Fleet("a", "b")
    first, second = streamed(1000), streamed(1000)
    for incoming in (first, second):
        await fleet.producer.produce(incoming, fleet.pods)
    assert fleet.scorer.score(RUN, first, fleet.pods) == [1.0, 1.0]
    fleet.send(first, fleet.pods[0])
    scores = fleet.scorer.score(RUN, second, fleet.pods)
    assert scores[0] < scores[1] == 1.0


async def test_a_pod_without_responses_uses_the_observations_of_others() -> None:
    fleet = Fleet("known", "new", slow=0.1)
    for at in range(40):
        fleet.send(streamed(500 + 397 * at % 4000), fleet.pods[0])
        fleet.advance(2.0)
        scores = await fleet.scores(streamed(4000))
    assert scores == {"known": 1.0, "new": 1.0}


@pytest.mark.parametrize("stream", [True, False])
async def test_pods_without_reports_share_the_work(stream: bool) -> None:
    """No usage, no scrape: what was sent is all that is known."""
    fleet, sent = Fleet("a", "b", says_usage=False), {"a": 0, "b": 0}
    for _ in range(60):
        incoming = replace(streamed(1000), stream=stream)
        found = await fleet.scores(incoming)
        best = [one for one in fleet.pods if found[one.name] == max(found.values())]
        target = min(best, key=lambda one: sent[one.name])
        sent[target.name] += 1000
        fleet.send(incoming, target)
        fleet.advance(0.06)
    assert sent == {"a": 30_000, "b": 30_000}


async def test_without_decode_cost_a_busy_decoding_pod_equals_an_idle_one() -> None:
    """The ablation of `decodeCost`."""
    found = {}
    for cost in (0.0, 0.05):
        fleet = Fleet("busy", "idle", decodeCost=cost)
        await fleet.learn()
        fleet.pods[0].charge(60, 0)
        scores = await fleet.scores(streamed(4000))
        found[cost] = scores["idle"] - scores["busy"]
    assert found[0.05] > found[0.0] + 0.2


class TestObjectives:
    async def fleet(self) -> Fleet:
        """`a` is idle, `b` has the prompt and half a second of work before it."""
        fleet = Fleet("a", "b")
        await fleet.learn()
        fleet.send(streamed(5000), fleet.pods[1])
        return fleet

    def request_with(self, **headers: str) -> InferenceRequest:
        return streamed(8192, {"b": 6144}, **headers)

    async def test_a_pod_that_meets_objectives_precedes_one_that_does_not(self) -> None:
        fleet = await self.fleet()
        assert await fleet.best(self.request_with()) == "b"
        scores = await fleet.scores(self.request_with(x_llm_d_slo_ttft_ms="750"))
        assert scores["b"] > 0.5 > scores["a"]

    async def test_the_older_header_is_equivalent(self) -> None:
        fleet = await self.fleet()
        new, old = self.request_with(x_llm_d_slo_ttft_ms="750"), self.request_with(x_slo_ttft_ms="750")
        assert await fleet.scores(new) == await fleet.scores(old)

    async def test_if_none_meets_the_objectives_the_smallest_violation_is_best(self) -> None:
        fleet = await self.fleet()
        scores = await fleet.scores(self.request_with(x_llm_d_slo_ttft_ms="10"))
        assert scores["a"] < scores["b"] < 0.5

    async def test_the_smallest_sufficient_headroom_leaves_faster_pods_to_others(self) -> None:
        fleet = await self.fleet()
        incoming = {"x_llm_d_slo_ttft_ms": "5000"}
        assert await fleet.best(self.request_with(**incoming)) == "b"
        fleet.scorer = make("latency-scorer", headroomSelectionStrategy="least")
        assert await fleet.best(self.request_with(**incoming)) == "a"
        fleet.scorer = make("latency-scorer", headroomSelectionStrategy="most")
        assert await fleet.best(self.request_with(**incoming)) == "b"

    async def test_an_objective_per_token_avoids_pods_that_decode_much(self) -> None:
        fleet = Fleet("busy", "idle")
        fleet.pods[0].charge(100, 0)
        scores = await fleet.scores(streamed(100, x_llm_d_slo_tpot_ms="15"))
        assert scores["idle"] > 0.5 > scores["busy"]

    @pytest.mark.parametrize("text", ["", "soon", "-5", "0", "nan", "inf"])
    async def test_an_invalid_number_of_milliseconds_is_no_objective(self, text: str) -> None:
        fleet = await self.fleet()
        assert await fleet.scores(self.request_with(x_llm_d_slo_ttft_ms=text)) == await fleet.scores(
            self.request_with()
        )


async def test_predictions_are_used_with_any_error() -> None:
    fleet = Fleet("a", "b")
    for _ in range(30):
        fleet.producer.fleet.observe_error(3.0, 1.0)
    assert fleet.producer.error > 1.5
    assert await fleet.best(streamed(4096, {"b": 2048})) == "b"


def test_without_predictions_no_pod_is_preferred() -> None:
    assert make("latency-scorer").score(RUN, request(10), [pod("a", waiting=4), pod("b", waiting=1)]) == [0.0, 0.0]


def test_invalid_parameters_are_refused() -> None:
    assert "scaleSeconds" in fault("latency-scorer", scaleSeconds=0)
    assert "workCost" in fault("predicted-latency-producer", workCost=-1)


def test_a_removed_parameter_is_reported_with_its_replacement() -> None:
    found = fault("predicted-latency-producer", maxRelativeError=0.5)
    assert "maxRelativeError: was removed" in found
    assert "kvlane_latency_prediction_error_ratio" in found


def test_the_scorer_can_be_bound_to_a_producer() -> None:
    assert make("latency-scorer", latencyPredictionInfoProducerName="mine").requires == (LATENCY.of("mine"),)


class Costs:
    """A prediction with given values."""

    output = 1.0

    def __init__(self, costs: Sequence[float]) -> None:
        self._costs = list(costs)

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return self._costs

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        return 0.0

    ttfts = tpots = delays = costs


@settings(max_examples=examples(100))
@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=8),
    st.sampled_from(["", "100", "1e-3", "1e9"]),
    st.sampled_from(["cheapest", "least", "most"]),
)
def test_scores_are_in_0_to_1_and_cheaper_is_never_lower(costs: list[float], slo: str, strategy: str) -> None:
    incoming = replace(request(10), headers={"x-slo-ttft-ms": slo, "x-slo-tpot-ms": slo} if slo else {})
    incoming.state.write(LATENCY, Costs(costs))
    scores = make("latency-scorer", headroomSelectionStrategy=strategy).score(RUN, incoming, [pod() for _ in costs])
    assert len(scores) == len(costs)
    assert all(0.0 <= one <= 1.0 for one in scores)
    if not slo:
        ordered = [score for _, score in sorted(zip(costs, scores, strict=True), key=lambda pair: pair[0])]
        assert ordered == sorted(ordered, reverse=True)
        assert max(scores) == 1.0


class TestStages:
    """Several pods serve one request."""

    def start(self, fleet: Fleet, target: Endpoint, stage: Stage, tokens: int = 8000) -> Attempt:
        dispatched = attempt(streamed(tokens), target)
        dispatched.stage, dispatched.for_client = stage, stage is Stage.DECODE
        dispatched.started_at = fleet.clock.now()
        dispatched.charge = (0 if stage is Stage.DECODE else tokens, 0)
        fleet.producer.pre_request(dispatched, target)
        return dispatched

    async def wait(self, fleet: Fleet) -> list[float]:
        """What a prompt would wait on each pod."""
        incoming = streamed(16)
        await fleet.producer.produce(incoming, fleet.pods)
        forecast = incoming.state.read(LATENCY)
        assert forecast is not None
        return forecast.ttfts(fleet.pods)

    async def test_computing_a_prompt_counts_as_busy_and_decoding_or_encoding_does_not(self) -> None:
        fleet = Fleet("computes", "answers", "encodes", "idle")
        await fleet.learn()
        for target, stage in zip(fleet.pods, (Stage.PREFILL, Stage.DECODE, Stage.ENCODE), strict=False):
            self.start(fleet, target, stage)
        computes, decodes, encodes, idle = await self.wait(fleet)
        assert computes > idle + 0.7
        assert decodes == pytest.approx(idle, abs=0.03)
        assert encodes == pytest.approx(idle, abs=0.03)

    async def test_an_encode_attempt_is_not_learnt_from(self) -> None:
        fleet = Fleet("a")
        await fleet.learn()
        before = await self.wait(fleet)
        for _ in range(30):
            dispatched = self.start(fleet, fleet.pods[0], Stage.ENCODE)
            fleet.clock.advance(9.0)
            dispatched.status, dispatched.ending = 200, Ending.COMPLETE
            dispatched.first_byte_at = dispatched.last_byte_at = fleet.clock.now()
            dispatched.usage = Usage(8000, 1)
            fleet.producer.post_response(dispatched, dispatched.endpoint)
        assert await self.wait(fleet) == pytest.approx(before)

    async def test_a_prompt_delays_running_responses_by_its_uncached_part(self) -> None:
        fleet = Fleet("a", "b")
        await fleet.learn()
        for target in fleet.pods:
            target.publish(replace(target.metrics, running=4, scraped_at=fleet.clock.now()), 0)
        incoming = streamed(4096, {"b": 4080})
        await fleet.producer.produce(incoming, fleet.pods)
        forecast = incoming.state.read(LATENCY)
        assert forecast is not None
        cold, warm = forecast.delays(fleet.pods)
        assert cold == pytest.approx(4 * 0.41, rel=0.2)
        assert warm < 0.1 * cold
