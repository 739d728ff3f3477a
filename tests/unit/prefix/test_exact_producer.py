"""The exact producer, and the one that trusts it as far as it is sure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.decision import Decision, ProfileRun
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.params import Invalid
from proxy.core.ports import BlocksStored, Clock, InstanceName, KvEvents, KvListener, KvSources, ManualClock
from proxy.core.registry import make_plugin
from proxy.core.request import InferenceRequest, Prompt
from proxy.plugins.producers.exact_or_approx_prefix_cache import ExactOrApproxPrefixCacheProducer
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.plugins.scorers.precise_prefix_cache import PrecisePrefixCacheScorer
from proxy.prefix.match import PREFIX_MATCH, TOKEN_IDS, PrefixMatch

EXACT, APPROX, BOTH = (f"{kind}-prefix-cache-producer" for kind in ("precise", "approx", "exact-or-approx"))
SIZE = 16
IDS = list(range(100))


class Followed(KvEvents):
    """Keeps what was asked for."""

    def __init__(self) -> None:
        self.wishes: list[tuple[KvSources, KvListener]] = []

    def subscribe(self, sources: KvSources, listener: KvListener) -> None:
        self.wishes.append((sources, listener))


class Guess(PrefixMatch):
    def __init__(self, total: int, blocks: int) -> None:
        self.block_size = 64
        self.total = total
        self._blocks = blocks

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [self._blocks] * len(endpoints)


def make(cls: Any = PrecisePrefixCacheProducer, events: KvEvents | None = None, **parameters: Any) -> Any:
    ports = {Clock: ManualClock(), InstanceName: InstanceName(cls.plugin_type), KvEvents: events or Followed()}
    return make_plugin(cls, parameters, "plugins.it", ports)


def pod(name: str = "pod") -> Endpoint:
    return Endpoint(name, state=EndpointState.READY)


def request(ids: Sequence[int] | None = IDS, model: str = "m") -> InferenceRequest:
    incoming = InferenceRequest("id", "/v1/chat/completions", model, Prompt((b"text" * 100,)))
    if ids is not None:
        incoming.state.write(TOKEN_IDS, Prompt((array("I", ids).tobytes(),)))
    return incoming


def hold(producer: Any, endpoint: Endpoint, ids: Sequence[int] = IDS, first: int = 0) -> None:
    names = list(range(first, first + len(ids) // SIZE))
    tokens = array("I", ids[: len(names) * SIZE]).tobytes()
    producer.index.published(endpoint, 0, [BlocksStored(names, None, tokens, SIZE)])


def dispatched(producer: Any, incoming: InferenceRequest, endpoint: Endpoint) -> Attempt:
    attempt = Attempt(incoming, Decision(endpoint), endpoint, 0, 0.0)
    producer.pre_request(attempt, endpoint)
    return attempt


def end(producer: Any, attempt: Attempt, cached: int | None = None, status: int = 200) -> None:
    attempt.status, attempt.ending, attempt.first_byte_at = status, Ending.COMPLETE, 1.0
    attempt.usage = Usage(100, 1, cached)
    producer.post_response(attempt, attempt.endpoint)


async def test_the_match_equals_the_events() -> None:
    producer, one, other, incoming = make(), pod("one"), pod("other"), request()
    hold(producer, one)
    await producer.produce(incoming, [one, other])
    match = incoming.state.read(PREFIX_MATCH)
    assert match is incoming.state.read(PREFIX_MATCH.of(EXACT))
    assert match is not None
    assert (match.block_size, match.total) == (SIZE, 6)
    assert match.matched([other, one]) == [0, 6]
    assert match.missing([one, other], 1) == [4, 100]


async def test_a_prompt_without_token_ids_has_no_match() -> None:
    producer, incoming, one = make(), request(None), pod()
    await producer.produce(incoming, [one])
    assert incoming.state.read(PREFIX_MATCH) is None
    attempt = dispatched(producer, incoming, one)
    assert attempt.predicted_cached_tokens is None
    end(producer, attempt, cached=5)


async def test_siblings_join_a_request_in_flight() -> None:
    producer, one, other, first, second = make(), pod("one"), pod("other"), request(), request()
    await producer.produce(first, [one, other])
    attempt = dispatched(producer, first, one)
    assert attempt.predicted_cached_tokens == 0
    await producer.produce(second, [one, other])
    match = second.state.read(PREFIX_MATCH)
    assert match is not None
    assert match.matched([one, other]) == [6, 0]
    end(producer, attempt, status=500)
    assert match.matched([one, other]) == [0, 0]


async def test_for_a_transfer_no_blocks_are_expected_before_events() -> None:
    producer, first, second = make(), request(), request()
    decode, *_ = pods = [pod("decode"), pod("prefill"), pod("encode")]
    producer.index.complete(decode, 0, True)
    await producer.produce(first, pods)
    attempts = [Attempt(first, Decision(one), one, 0, 0.0) for one in pods]
    for attempt, stage in zip(attempts, (Stage.DECODE, Stage.PREFILL, Stage.ENCODE), strict=True):
        attempt.stage = stage
        producer.pre_request(attempt, attempt.endpoint)
    await producer.produce(second, pods)
    match = second.state.read(PREFIX_MATCH)
    assert match is not None
    assert match.matched(pods) == [0, 6, 0]
    for _ in range(5):  # it cannot know what another pod had cached
        end(producer, attempts[0], cached=96)
        producer.pre_request(attempts[0], decode)
    assert producer.index.is_sure(decode)


async def test_nothing_is_expected_if_disabled() -> None:
    producer, one, first, second = make(speculativeIndexing=False), pod(), request(), request()
    await producer.produce(first, [one])
    end(producer, dispatched(producer, first, one), cached=0)
    await producer.produce(second, [one])
    match = second.state.read(PREFIX_MATCH)
    assert match is not None
    assert match.matched([one]) == [0]


async def test_a_pod_whose_responses_contradict_its_events_is_unknown_until_they_agree(
    caplog: pytest.LogCaptureFixture,
) -> None:
    producer, one = make(), pod()
    hold(producer, one)
    producer.index.complete(one, 0, True)
    for cached, sure in [(0, True), (0, True), (96, True), (0, True), (16, True), (0, False), (80, True)]:
        incoming = request()
        await producer.produce(incoming, [one])
        attempt = dispatched(producer, incoming, one)
        assert attempt.predicted_cached_tokens == 96
        end(producer, attempt, cached=cached)
        assert producer.index.is_sure(one) is sure
    assert caplog.text.count("reported 0 cached tokens instead of the predicted 96") == 1


async def test_a_prompt_without_hits_proves_nothing() -> None:
    producer, one = make(), pod()
    producer.index.complete(one, 0, True)
    hold(producer, one)
    for ids, cached in [(IDS, 0), (IDS, 0), (range(500, 600), 0), (IDS, 0)]:
        incoming = request(list(ids))
        await producer.produce(incoming, [one])
        end(producer, dispatched(producer, incoming, one), cached=cached)
        for expected in list(producer.index._pods[one].expected):
            producer.index._confirm(producer.index._pods[one], [expected])
    assert not producer.index.is_sure(one)


def test_a_restart_noticed_elsewhere_drops_unconfirmed_blocks() -> None:
    producer, silent, noticed = make(), pod("silent"), pod("heard")
    for endpoint in (silent, noticed):
        hold(producer, endpoint)
        producer.index.complete(endpoint, 0, endpoint is noticed)
        producer.endpoint_removed(endpoint)
    producer.endpoint_removed(pod("stranger"))
    assert producer.index.pairs == 6
    assert producer.index.is_sure(noticed)


def test_it_subscribes_to_the_configured_events() -> None:
    events = Followed()
    make(events=events)
    discovery = {"socketPort": 6000, "replaySocketPort": 6100}
    make(events=events, kvEventsConfig={"topicFilter": "kv@", "podDiscoveryConfig": discovery, "dataParallelSize": 2})
    make(events=events, kvEventsConfig={"discoverPods": False, "zmqEndpoint": "tcp://*:5557"})
    assert [sources for sources, _ in events.wishes] == [
        KvSources(),
        KvSources(port=6000, replay_port=6100, ranks=2, topic="kv@"),
        KvSources(bind="tcp://*:5557"),
    ]
    with pytest.raises(Invalid, match="zmqEndpoint"):
        make(kvEventsConfig={"discoverPods": False})


def test_parameters_of_other_schedulers_are_accepted() -> None:
    made = make(
        tokenProcessorConfig={"blockSize": 64, "hashSeed": "42"},
        indexerConfig={
            "kvCacheBackendConfigs": [{"name": "GPU"}, {"name": "cpu", "weight": 0.0}],
            "kvBlockIndexConfig": {"inMemoryConfig": {"size": 10, "podCacheSize": 10}, "enableMetrics": True},
            "tokenizersPoolConfig": {"modelName": "m"},
        },
        speculativeTTL="5s",
    )
    assert made.token_processor_config.block_size_tokens == 64
    assert made.index.block_size(pod()) == 64


async def test_the_older_scorer_is_also_a_producer() -> None:
    scorer, one, other, incoming = make(PrecisePrefixCacheScorer), pod("one"), pod("other"), request()
    hold(scorer, one, IDS[:48])
    assert scorer.score(ProfileRun("p"), incoming, [one]) == [0.0]
    await scorer.produce(incoming, [one, other])
    assert scorer.score(ProfileRun("p"), incoming, [one, other]) == [0.5, 0.0]
    attempt = dispatched(scorer, incoming, other)
    end(scorer, attempt)
    assert attempt.predicted_cached_tokens == 0


async def both(
    exact: PrecisePrefixCacheProducer, incoming: InferenceRequest, guess: Guess | None, *pods: Endpoint
) -> Any:
    """The match of the third producer."""
    third = make(ExactOrApproxPrefixCacheProducer)
    if guess is not None:
        incoming.state.write(PREFIX_MATCH.of(APPROX), guess)
    await exact.produce(incoming, pods)
    await third.produce(incoming, pods)
    match = incoming.state.read(PREFIX_MATCH.of(BOTH))
    assert match is incoming.state.read(PREFIX_MATCH), "a reader that names no producer reads this one"
    return match


async def test_a_known_pod_is_matched_exactly_and_others_approximately() -> None:
    exact, known, unknown, incoming = make(), pod("known"), pod("unknown"), request()
    exact.index.complete(known, 0, True)
    hold(exact, known, IDS[:32])
    match = await both(exact, incoming, Guess(total=12, blocks=8), known, unknown)
    assert (match.block_size, match.total) == (SIZE, 6)
    assert match.matched([known, unknown]) == [2, 4]
    assert match.missing([known, unknown], 1) == [68, 36]


async def test_for_a_partly_known_pod_the_larger_match_counts() -> None:
    exact, one = make(), pod()
    hold(exact, one, IDS[:48])
    assert (await both(exact, request(), Guess(total=6, blocks=1), one)).matched([one]) == [3]
    assert (await both(exact, request(), Guess(total=6, blocks=5), one)).matched([one]) == [5]
    assert (await both(exact, request(), Guess(total=0, blocks=0), one)).matched([one]) == [3]


async def test_a_prompt_without_token_ids_is_matched_approximately_on_all_pods() -> None:
    exact, one = make(), pod()
    exact.index.complete(one, 0, True)
    guess = Guess(total=6, blocks=5)
    assert await both(exact, request(None), guess, one) is guess
    assert await both(exact, request(None), None, one) is None


async def test_its_prediction_is_the_reported_one() -> None:
    exact, one, incoming = make(), pod(), request()
    await both(exact, incoming, Guess(total=6, blocks=3), one)
    attempt = dispatched(exact, incoming, one)
    assert attempt.predicted_cached_tokens == 0
    make(ExactOrApproxPrefixCacheProducer).pre_request(attempt, one)
    assert attempt.predicted_cached_tokens == 48
