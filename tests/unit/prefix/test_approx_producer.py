from dataclasses import replace
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, Metrics
from proxy.core.params import Invalid
from proxy.core.plugin import points_of
from proxy.core.ports import Clock, InstanceName, ManualClock
from proxy.core.registry import make_plugin
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import PluginState
from proxy.latency.pod import PodModel, Prices, costs
from proxy.latency.rates import FleetModel
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.prefix.feedback import MOST_ATTEMPTS
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch, most_cached

NAME = "approx-prefix-cache-producer"
BLOCK = 64 * 4
PER_TOKEN = 100e-6
"""Seconds of prefill that are assumed before the first observation."""
LONG = bytes(range(256)) * 10


def make(**parameters: Any) -> ApproxPrefixCacheProducer:
    ports = {Clock: ManualClock(), InstanceName: InstanceName(NAME), PluginState: PluginState()}
    made = make_plugin(ApproxPrefixCacheProducer, parameters, f"plugins.{NAME}", ports)
    assert isinstance(made, ApproxPrefixCacheProducer)
    return made


def ask(prompt: bytes = LONG, model: str = "m", salt: str = "") -> InferenceRequest:
    return InferenceRequest("id", "/v1/completions", model, Prompt((prompt,), salt))


async def produced(producer: ApproxPrefixCacheProducer, request: InferenceRequest) -> PrefixMatch:
    await producer.produce(request, ())
    match = request.state.read(PREFIX_MATCH)
    assert match is not None
    return match


async def start(producer: ApproxPrefixCacheProducer, request: InferenceRequest, endpoint: Endpoint) -> Attempt:
    await produced(producer, request)
    return dispatched(producer, request, endpoint)


def dispatched(producer: ApproxPrefixCacheProducer, request: InferenceRequest, endpoint: Endpoint) -> Attempt:
    attempt = Attempt(request, Decision(endpoint), endpoint, 0, 0.0)
    producer.pre_request(attempt, endpoint)
    return attempt


def end(
    producer: ApproxPrefixCacheProducer,
    attempt: Attempt,
    ending: Ending = Ending.COMPLETE,
    status: int | None = 200,
    first_byte: bool = True,
    cached: int | None = None,
    output_tokens: int = 1,
) -> None:
    attempt.ending, attempt.status = ending, status
    attempt.first_byte_at = 1.0 if first_byte else None
    attempt.usage = Usage(640, output_tokens, cached)
    producer.post_response(attempt, attempt.endpoint)


async def held(producer: ApproxPrefixCacheProducer, endpoint: Endpoint, request: InferenceRequest | None = None) -> int:
    (blocks,) = (await produced(producer, request or ask())).matched((endpoint,))
    return blocks


@pytest.fixture
def producer() -> ApproxPrefixCacheProducer:
    return make()


@pytest.fixture
def pod() -> Endpoint:
    return Endpoint("pod")


async def test_a_successful_response_adds_the_prompt_to_its_pod(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    other = Endpoint("other")
    end(producer, await start(producer, ask(), pod))
    match = await produced(producer, ask())
    assert (match.block_size, match.total, match.matched((other, pod))) == (64, 10, [0, 10])
    cold, size, by_pod = match.lacks((other, pod), 700)
    lacking = [cold - size * by_pod.get(one, 0) for one in (other, pod)]
    assert lacking == match.missing((other, pod), 700) == [700, 60]


async def test_a_pod_that_has_all_of_a_short_prompt_saves_no_more_than_its_tokens(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    other, short = Endpoint("other"), b"Tell me of the sea."
    end(producer, await start(producer, ask(short), pod))
    match = await produced(producer, ask(short))
    assert match.matched((other, pod)) == [0, 1]
    models = [PodModel(one, FleetModel(), Prices(0.0, 0.0), 0.0) for one in (other, pod)]
    cold, size, blocks = match.lacks((other, pod), 5)
    without, with_prompt = costs(models, 1.0 * cold, 1.0 * size, blocks, 5.0, 0.0)
    assert without - with_prompt == pytest.approx(5 * PER_TOKEN)


@pytest.mark.parametrize(
    ("ending", "status", "first_byte", "kept"),
    [
        (Ending.COMPLETE, 200, True, 10),
        (Ending.COMPLETE, 500, True, 0),
        (Ending.COMPLETE, 400, True, 0),
        (Ending.CLIENT_GONE, 200, True, 10),
        (Ending.CLIENT_GONE, 200, False, 0),
        (Ending.CLIENT_GONE, None, False, 0),
        (Ending.EVICTED, 200, True, 10),
        (Ending.UPSTREAM_FAILED, None, False, 0),
        (Ending.UPSTREAM_FAILED, 200, True, 0),
        (Ending.TIMED_OUT, 200, True, 0),
    ],
)
async def test_blocks_stay_if_the_pod_computed_the_prompt(
    producer: ApproxPrefixCacheProducer, pod: Endpoint, ending: Ending, status: int | None, first_byte: bool, kept: int
) -> None:
    attempt = await start(producer, ask(), pod)
    assert await held(producer, pod) == 10
    end(producer, attempt, ending, status, first_byte)
    assert await held(producer, pod) == kept


async def test_models_and_salts_are_separate(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    end(producer, await start(producer, ask(model="m", salt="s"), pod))
    assert await held(producer, pod, ask(model="m")) == 0
    assert await held(producer, pod, ask(model="ms")) == 0
    assert await held(producer, pod, ask(model="m", salt="s")) == 10


async def test_a_request_does_not_hit_itself(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    request = ask()
    attempt = await start(producer, request, pod)
    match = request.state.read(PREFIX_MATCH)
    assert match is not None
    assert match.matched((pod,)) == [0]
    assert attempt.predicted_cached_tokens == 0


async def test_the_prediction_of_an_attempt_is_the_state_before_it(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    end(producer, await start(producer, ask(LONG[: 3 * BLOCK]), pod))
    assert (await start(producer, ask(), pod)).predicted_cached_tokens == 3 * 64
    assert (await start(producer, ask(LONG[: 3 * BLOCK]), pod)).predicted_cached_tokens == 3 * 64 - 1
    pod.publish(replace(pod.metrics, block_size=16), 0)
    assert (await start(producer, ask(LONG[: 3 * BLOCK]), pod)).predicted_cached_tokens == 3 * 64 - 16


@pytest.mark.parametrize(
    ("tokens", "block_size", "most"),
    [(7, 16, 0), (16, 16, 0), (17, 16, 16), (64, 16, 48), (7, 0, 6), (1, 0, 0), (0, 16, 0)],
)
def test_engines_cache_full_blocks_and_never_the_last_token(tokens: int, block_size: int, most: int) -> None:
    assert most_cached(tokens, block_size) == most


async def test_an_early_match_sees_later_changes(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    early = await produced(producer, ask())
    assert early.matched((pod,)) == [0]
    await start(producer, ask(), pod)
    assert early.matched((pod,)) == [10]


async def test_the_attempts_of_a_request_are_settled_separately(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    other, request = Endpoint("other"), ask()
    first = await start(producer, request, pod)
    end(producer, first, Ending.UPSTREAM_FAILED, None, first_byte=False)
    end(producer, dispatched(producer, request, other))
    end(producer, first)
    assert (await produced(producer, ask())).matched((pod, other)) == [0, 10]


async def test_nothing_is_kept_of_ended_attempts(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    for ending in (Ending.COMPLETE, Ending.UPSTREAM_FAILED):
        end(producer, await start(producer, ask(), pod), ending)
    assert producer._reservations == {}


async def test_an_attempt_without_hashes_is_ignored(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    attempt = dispatched(producer, ask(), pod)
    end(producer, attempt)
    assert (attempt.predicted_cached_tokens, producer.index.pairs) == (None, 0)


@pytest.mark.parametrize("prompt", [Prompt(), Prompt((b"",))])
@pytest.mark.parametrize("output_tokens", [1, 64])
async def test_an_empty_prompt_has_no_match(
    producer: ApproxPrefixCacheProducer, pod: Endpoint, prompt: Prompt, output_tokens: int
) -> None:
    request = replace(ask(), prompt=prompt)
    end(producer, await start(producer, request, pod), output_tokens=output_tokens)
    match = request.state.read(PREFIX_MATCH)
    assert match is not None
    assert (match.total, match.matched((pod,))) == (0, [0])


async def test_the_prompts_of_a_batch_are_summed(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    end(producer, await start(producer, replace(ask(), prompt=Prompt((b"a" * 300, b"b" * 600))), pod))
    match = await produced(producer, replace(ask(), prompt=Prompt((b"a" * 300, b"b" * 256, b"c"))))
    assert (match.total, match.matched((pod,))) == (4, [3])


async def test_long_prompts_have_the_full_number_of_blocks(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    """Hashed deep down a few at a time, predicted and counted one by one."""
    long = bytes(512 * BLOCK)
    end(producer, await start(producer, ask(long), pod))
    match = await produced(producer, ask(long + b"!" * 8 * BLOCK))
    assert (match.total, match.matched((pod,)), match.lengths((pod,))) == (528, [512], [512 * 64])
    assert (producer.index.blocks(pod), producer.index.pairs) == (512, 512)
    assert (await start(producer, ask(long + b"!" * BLOCK), pod)).predicted_cached_tokens == 512 * 64


async def test_a_prediction_never_exceeds_the_prompt(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    long = bytes(500 * BLOCK + 5)
    end(producer, await start(producer, ask(long), pod))
    again = await start(producer, ask(long), pod)
    assert again.predicted_cached_tokens == again.request.prompt.tokens - 1


async def test_a_tokenized_prompt_is_hashed_instead_of_the_estimate(producer: ApproxPrefixCacheProducer) -> None:
    request = ask()
    request.state.write(TOKENIZED_PROMPT, Prompt((b"x" * BLOCK,)))
    assert (await produced(producer, request)).total == 1


async def test_the_datum_is_bound_to_the_name_of_the_instance(producer: ApproxPrefixCacheProducer) -> None:
    request = ask()
    match = await produced(producer, request)
    assert producer.provides == (PREFIX_MATCH.of(NAME),)
    assert request.state.read(PREFIX_MATCH.of(NAME)) is match
    assert request.state.read(PREFIX_MATCH.of("other")) is None


async def test_a_removed_pod_is_dropped(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    end(producer, await start(producer, ask(), pod))
    producer.endpoint_removed(pod)
    assert await held(producer, pod) == 0


async def test_a_pod_that_repeatedly_reports_no_hits_restarts_with_the_last_prompt(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    end(producer, await start(producer, ask(b"old" * 1000), pod))
    for cached in (None, 0, 0, 0):
        end(producer, await start(producer, ask(), pod), cached=cached)
    assert await held(producer, pod, ask(b"old" * 1000)) == 0
    assert await held(producer, pod) == 10


async def test_predictions_are_counted_for_engines_that_report(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    end(producer, await start(producer, ask(), pod))
    end(producer, await start(producer, ask(), pod), cached=600)
    assert producer.index.prediction_error(pod) == 40 / 640


QUESTION = b"user\n" + b"question " * 100 + b"\n"
NEXT_TURN = QUESTION + b"assistant\n" + b"answer " * 150 + b"\nuser\n" + b"and then? " * 60 + b"\n"


async def converse(producer: ApproxPrefixCacheProducer, pod: Endpoint, tokens: int = 260) -> None:
    attempt = await start(producer, ask(QUESTION), pod)
    attempt.ending, attempt.status, attempt.first_byte_at = Ending.COMPLETE, 200, 1.0
    attempt.usage = Usage(225, tokens)
    producer.post_response(attempt, pod)


async def test_the_next_turn_finds_the_response_on_its_pod(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    other = Endpoint("other")
    end(producer, await start(producer, ask(QUESTION), other))
    await converse(producer, pod)
    response_end = len(QUESTION) + len(b"assistant\n") + len(b"answer " * 150)
    match = await produced(producer, ask(NEXT_TURN))
    assert match.matched((pod, other)) == [response_end // BLOCK, len(QUESTION) // BLOCK]


async def test_a_turn_on_another_pod_finds_no_response(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    await converse(producer, pod)
    edited = NEXT_TURN.replace(b"question \n", b"question!\n")
    assert await held(producer, pod, ask(edited)) == len(QUESTION) // BLOCK


async def test_a_response_without_its_reasoning_is_not_predicted(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    await converse(producer, pod, tokens=2000)
    assert await held(producer, pod, ask(NEXT_TURN)) == len(QUESTION) // BLOCK


async def test_without_usage_the_chunks_give_the_length_of_the_response(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    attempt = await start(producer, ask(QUESTION), pod)
    attempt.ending, attempt.status, attempt.chunks = Ending.COMPLETE, 200, 260
    producer.post_response(attempt, pod)
    assert await held(producer, pod, ask(NEXT_TURN)) > len(QUESTION) // BLOCK


async def test_a_started_response_confirms_its_prompt(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    attempts = [await start(producer, ask(), pod) for _ in range(16)]
    assert await held(producer, pod) == 0
    attempts[3].first_byte_at, attempts[3].status = 1.0, 200
    assert isinstance(producer.clock, ManualClock)
    producer.clock.advance(0.1)
    assert await held(producer, pod) == 10
    assert not producer.index.is_crowded


async def test_a_refusal_does_not_confirm_the_prompt(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    attempts = [await start(producer, ask(), pod) for _ in range(16)]
    attempts[3].first_byte_at, attempts[3].status = 1.0, 429
    assert isinstance(producer.clock, ManualClock)
    producer.clock.advance(0.1)
    assert await held(producer, pod) == 0
    assert producer.index.is_crowded


async def counted(
    producer: ApproxPrefixCacheProducer, pod: Endpoint, hits: float, queries: float = 640 * 8, ending: bool = True
) -> None:
    """Eight requests of ten known blocks without reports of cached tokens; then a scrape."""
    clock = producer.clock
    assert isinstance(clock, ManualClock)
    scraped = pod.metrics
    end(producer, await start(producer, ask(), pod))
    for number in range(8):
        request = ask()
        await produced(producer, request)
        attempt = Attempt(request, Decision(pod), pod, 0, clock.now())
        producer.pre_request(attempt, pod)
        clock.advance(0.1)
        attempt.first_byte_at, attempt.status = clock.now(), 200
        if ending or number == 0:
            attempt.ending = Ending.COMPLETE
            producer.post_response(attempt, pod)
    clock.advance(3)
    pod.publish(
        replace(
            scraped,
            prefix_queries=scraped.prefix_queries + queries,
            prefix_hits=scraped.prefix_hits + hits,
            scraped_at=clock.now(),
        ),
        0,
    )
    late = ask(b"something else" * 100)
    await produced(producer, late)
    producer.pre_request(Attempt(late, Decision(pod), pod, 0, clock.now()), pod)
    await start(producer, ask(b"and another" * 100), pod)


@pytest.mark.parametrize(
    ("hits", "queries", "ending", "kept"),
    [
        (0, 640 * 8, True, 0),
        (640, 640 * 8, True, 0),
        (640 * 8, 640 * 8, True, 10),
        (640 * 7, 640 * 8, True, 10),
        (640 * 30, 640 * 60, True, 10),
        (0, 0, True, 10),
    ],
)
async def test_a_pod_with_fewer_hits_than_predicted_loses_blocks(
    producer: ApproxPrefixCacheProducer, hits: float, queries: float, ending: bool, kept: int
) -> None:
    """However many hits of others it counts too."""
    pod = Endpoint("pod", metrics=Metrics(scraped_at=-1.0, prefix_queries=5000, prefix_hits=400))
    await counted(producer, pod, hits, queries, ending)
    assert await held(producer, pod) == kept


async def test_missing_hits_are_noticed_before_the_responses_end(producer: ApproxPrefixCacheProducer) -> None:
    pod = Endpoint("pod", metrics=Metrics(scraped_at=-1.0))
    end(producer, await start(producer, ask(b"idle" * 1000), pod))
    await counted(producer, pod, 0, ending=False)
    assert await held(producer, pod, ask(b"idle" * 1000)) == 0
    assert await held(producer, pod) == 10, "in use"


async def test_for_a_pod_without_counters_little_is_kept(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    assert isinstance(producer.clock, ManualClock)
    for _ in range(MOST_ATTEMPTS + 2):
        end(producer, await start(producer, ask(b"x"), pod))
    request = ask()
    await produced(producer, request)
    producer.pre_request(Attempt(request, Decision(pod), pod, 0, 100.0), pod)
    assert not producer._windows[pod].ended
    producer.endpoint_removed(pod)
    assert not producer._windows


@pytest.mark.parametrize(
    ("parameters", "blocks", "block_size", "expected"),
    [
        ({}, 100, 16, 25),
        ({"blockSizeTokens": 128}, 100, 16, 12),
        ({}, 0, 16, 31250),
        ({"lruCapacityPerServer": 0}, 0, 0, 31250),
        ({"lruCapacityPerServer": 7}, 0, 0, 7),
        ({"autoTune": False, "lruCapacityPerServer": 7}, 100, 16, 7),
    ],
)
def test_a_pod_is_tracked_up_to_its_kv_capacity(
    parameters: dict[str, Any], blocks: int, block_size: int, expected: int
) -> None:
    pod, producer = Endpoint("pod", metrics=Metrics(blocks=blocks, block_size=block_size)), make(**parameters)
    assert producer._capacity(pod.metrics.blocks * pod.metrics.block_size) == expected


@pytest.mark.parametrize(
    ("parameters", "total"),
    [
        ({}, 10),
        ({"blockSizeTokens": 16}, 10),
        ({"blockSize": 128}, 5),
        ({"maxPrefixTokensToMatch": 200}, 3),
        ({"maxPrefixTokensToMatch": 10}, 1),
        ({"maxPrefixTokensToMatch": 0, "maxPrefixBlocksToMatch": 2}, 2),
        ({"maxPrefixTokensToMatch": 640, "maxPrefixBlocksToMatch": 2}, 10),
        ({"maxPrefixTokensToMatch": 0, "maxPrefixBlocksToMatch": 0}, 10),
        ({"blockSizeTokens": 0}, 10),
    ],
)
async def test_block_size_and_limits_determine_the_blocks_of_a_prompt(parameters: dict[str, Any], total: int) -> None:
    assert (await produced(make(**parameters), ask())).total == total


def test_a_fixed_block_size_must_be_valid() -> None:
    with pytest.raises(Invalid, match=r"blockSizeTokens") as invalid:
        make(autoTune=False, blockSizeTokens=0)
    assert invalid.value.problems[0].path == f"plugins.{NAME}"


def test_it_declares_its_extension_points() -> None:
    points = {point.__name__ for point in points_of(ApproxPrefixCacheProducer)}
    assert points == {"DataProducer", "PreRequest", "PostResponse", "EndpointRemoved"}
    assert not ApproxPrefixCacheProducer.waits


class TestStages:
    """One pod computes the prompt, another decodes: their attempts have one request."""

    def dispatched(
        self, producer: ApproxPrefixCacheProducer, request: InferenceRequest, endpoint: Endpoint, stage: Stage
    ) -> Attempt:
        attempt = Attempt(request, Decision(endpoint), endpoint, 0, 0.0)
        attempt.stage, attempt.for_client = stage, stage is Stage.DECODE
        producer.pre_request(attempt, endpoint)
        return attempt

    async def split(self, producer: ApproxPrefixCacheProducer, *pods: Endpoint) -> list[Attempt]:
        request = ask()
        await produced(producer, request)
        stages = (Stage.DECODE, Stage.PREFILL, Stage.ENCODE)
        return [self.dispatched(producer, request, pod, stage) for pod, stage in zip(pods, stages, strict=False)]

    async def test_the_prefill_pod_has_the_prompt_at_once_and_the_decode_pod_at_its_first_byte(
        self, producer: ApproxPrefixCacheProducer
    ) -> None:
        decode, prefill = Endpoint("decode"), Endpoint("prefill")
        answering, _ = await self.split(producer, decode, prefill)
        assert (await held(producer, prefill), await held(producer, decode)) == (10, 0)
        answering.first_byte_at, answering.status = 1.0, 200
        clock = producer.clock
        assert isinstance(clock, ManualClock)
        clock.advance(1.0)
        assert (await held(producer, prefill), await held(producer, decode)) == (10, 10)

    async def test_afterwards_both_have_it(self, producer: ApproxPrefixCacheProducer) -> None:
        decode, prefill = Endpoint("decode"), Endpoint("prefill")
        answering, computing = await self.split(producer, decode, prefill)
        end(producer, computing)
        end(producer, answering)
        assert (await held(producer, prefill), await held(producer, decode)) == (10, 10)

    async def test_a_failed_transfer_leaves_it_on_the_prefill_pod(self, producer: ApproxPrefixCacheProducer) -> None:
        decode, prefill = Endpoint("decode"), Endpoint("prefill")
        answering, computing = await self.split(producer, decode, prefill)
        end(producer, answering, Ending.UPSTREAM_FAILED, 500)
        end(producer, computing)
        assert (await held(producer, prefill), await held(producer, decode)) == (10, 0)

    async def test_a_failed_prefill_leaves_nothing_there(self, producer: ApproxPrefixCacheProducer) -> None:
        decode, prefill = Endpoint("decode"), Endpoint("prefill")
        answering, computing = await self.split(producer, decode, prefill)
        end(producer, computing, Ending.UPSTREAM_FAILED, 500)
        answering.stage = Stage.WHOLE  # and computes it itself
        end(producer, answering)
        assert (await held(producer, prefill), await held(producer, decode)) == (0, 10)

    async def test_cached_tokens_of_the_prefill_pod_correct_and_those_of_the_decode_pod_do_not(
        self, producer: ApproxPrefixCacheProducer
    ) -> None:
        decode, prefill = Endpoint("decode"), Endpoint("prefill")
        for name_of in await self.split(producer, decode, prefill):
            end(producer, name_of)
        for _ in range(5):
            answering, computing = await self.split(producer, decode, prefill)
            end(producer, computing, cached=640)
            end(producer, answering, cached=0)
        assert (await held(producer, prefill), await held(producer, decode)) == (10, 10)
        reported = {memory.endpoint: memory.prompt_tokens for memory in producer.index.memories}
        assert reported[prefill] > reported[decode] == 0

    async def test_an_encode_pod_computes_no_prompt(self, producer: ApproxPrefixCacheProducer) -> None:
        decode, prefill, encode = (Endpoint(name) for name in ("decode", "prefill", "encode"))
        *_, encoding = await self.split(producer, decode, prefill, encode)
        assert await held(producer, encode) == 0
        end(producer, encoding)
        assert await held(producer, encode) == 0

    async def test_blocks_of_a_whole_request_in_between_are_found_when_confirmed(
        self, producer: ApproxPrefixCacheProducer
    ) -> None:
        decode, prefill = Endpoint("decode"), Endpoint("prefill")
        answering, _ = await self.split(producer, decode, prefill)
        whole = await start(producer, ask(), decode)
        assert await held(producer, decode) == 0
        end(producer, whole)
        assert await held(producer, decode) == 10
        end(producer, answering, Ending.UPSTREAM_FAILED, 500)
        assert await held(producer, decode) == 10
