from dataclasses import replace
from typing import Any

import pytest

from proxy.core import wiring
from proxy.core.clock import ManualClock
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, Metrics
from proxy.core.exchange import Ending, Exchange, Usage
from proxy.core.params import Invalid
from proxy.core.plugin import points_of
from proxy.core.ports import Clock, InstanceName
from proxy.core.request import InferenceRequest, Prompt
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.prefix.index import Prediction
from proxy.prefix.keys import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch

NAME = "approx-prefix-cache-producer"
BLOCK = 64 * 4
LONG = bytes(range(256)) * 10


def make(**parameters: Any) -> ApproxPrefixCacheProducer:
    ports = {Clock: ManualClock(), InstanceName: InstanceName(NAME)}
    made = wiring.make(ApproxPrefixCacheProducer, parameters, f"plugins.{NAME}", ports)
    assert isinstance(made, ApproxPrefixCacheProducer)
    return made


def ask(prompt: bytes = LONG, model: str = "m", salt: str = "") -> InferenceRequest:
    return InferenceRequest("id", "/v1/completions", model, Prompt((prompt,), salt))


async def produced(producer: ApproxPrefixCacheProducer, request: InferenceRequest) -> PrefixMatch:
    await producer.produce(request, ())
    match = request.state.read(PREFIX_MATCH)
    assert match is not None
    return match


async def begin(producer: ApproxPrefixCacheProducer, request: InferenceRequest, endpoint: Endpoint) -> Exchange:
    await produced(producer, request)
    return leg(producer, request, endpoint)


def leg(producer: ApproxPrefixCacheProducer, request: InferenceRequest, endpoint: Endpoint) -> Exchange:
    exchange = Exchange(request, Decision(endpoint), endpoint, 0, 0.0)
    producer.pre_request(exchange, endpoint)
    return exchange


def end(
    producer: ApproxPrefixCacheProducer,
    exchange: Exchange,
    ending: Ending = Ending.COMPLETE,
    status: int | None = 200,
    first_byte: bool = True,
    cached: int | None = None,
) -> None:
    exchange.ending, exchange.status = ending, status
    exchange.first_byte_at = 1.0 if first_byte else None
    exchange.usage = Usage(640, 1, cached)
    producer.post_response(exchange, exchange.endpoint)


async def held(producer: ApproxPrefixCacheProducer, endpoint: Endpoint, request: InferenceRequest | None = None) -> int:
    (blocks,) = (await produced(producer, request or ask())).matched((endpoint,))
    return blocks


@pytest.fixture
def producer() -> ApproxPrefixCacheProducer:
    return make()


@pytest.fixture
def pod() -> Endpoint:
    return Endpoint("pod")


async def test_a_good_answer_teaches_which_pod_has_the_prompt(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    other = Endpoint("other")
    end(producer, await begin(producer, ask(), pod))
    match = await produced(producer, ask())
    assert (match.block_size, match.total, match.matched((other, pod))) == (64, 10, [0, 10])


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
async def test_blocks_stay_if_the_pod_went_through_the_prompt(
    producer: ApproxPrefixCacheProducer, pod: Endpoint, ending: Ending, status: int | None, first_byte: bool, kept: int
) -> None:
    exchange = await begin(producer, ask(), pod)
    assert await held(producer, pod) == 10
    end(producer, exchange, ending, status, first_byte)
    assert await held(producer, pod) == kept


async def test_models_and_salts_do_not_see_each_other(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    end(producer, await begin(producer, ask(model="m", salt="s"), pod))
    assert await held(producer, pod, ask(model="m")) == 0
    assert await held(producer, pod, ask(model="ms")) == 0
    assert await held(producer, pod, ask(model="m", salt="s")) == 10


async def test_a_request_is_not_its_own_hit(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    request = ask()
    exchange = await begin(producer, request, pod)
    match = request.state.read(PREFIX_MATCH)
    assert match is not None
    assert match.matched((pod,)) == [0]
    assert exchange.predicted_cached_tokens == 0


async def test_the_prediction_of_a_leg_is_what_was_there_before(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    end(producer, await begin(producer, ask(LONG[: 3 * BLOCK]), pod))
    assert (await begin(producer, ask(), pod)).predicted_cached_tokens == 3 * 64
    assert (await begin(producer, ask(LONG[: 3 * BLOCK]), pod)).predicted_cached_tokens == 3 * 64


async def test_a_match_that_was_asked_early_sees_what_came_since(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    early = await produced(producer, ask())
    assert early.matched((pod,)) == [0]
    await begin(producer, ask(), pod)
    assert early.matched((pod,)) == [10]


async def test_the_legs_of_a_request_are_settled_one_by_one(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    other, request = Endpoint("other"), ask()
    first = await begin(producer, request, pod)
    end(producer, first, Ending.UPSTREAM_FAILED, None, first_byte=False)
    end(producer, leg(producer, request, other))
    end(producer, first)
    assert (await produced(producer, ask())).matched((pod, other)) == [0, 10]


async def test_nothing_is_kept_of_legs_that_have_ended(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    for ending in (Ending.COMPLETE, Ending.UPSTREAM_FAILED):
        end(producer, await begin(producer, ask(), pod), ending)
    assert producer._reservations == {}


async def test_a_leg_without_hashes_is_left_alone(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    exchange = leg(producer, ask(), pod)
    end(producer, exchange)
    assert (exchange.predicted_cached_tokens, producer.index.pairs) == (None, 0)


async def test_an_empty_prompt_is_no_match_and_no_fault(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    request = replace(ask(), prompt=Prompt())
    end(producer, await begin(producer, request, pod))
    match = request.state.read(PREFIX_MATCH)
    assert match is not None
    assert (match.total, match.matched((pod,))) == (0, [0])


async def test_the_prompts_of_a_batch_are_summed(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    end(producer, await begin(producer, replace(ask(), prompt=Prompt((b"a" * 300, b"b" * 600))), pod))
    match = await produced(producer, replace(ask(), prompt=Prompt((b"a" * 300, b"b" * 256, b"c"))))
    assert (match.total, match.matched((pod,))) == (4, [3])


async def test_long_prompts_have_as_many_blocks_as_short_ones_of_their_tokens(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    """Hashed deep down a few at a time, predicted and counted one by one."""
    long = bytes(512 * BLOCK)
    end(producer, await begin(producer, ask(long), pod))
    match = await produced(producer, ask(long + b"!" * 8 * BLOCK))
    assert (match.total, match.matched((pod,)), match.lengths((pod,))) == (528, [512], [512 * 64])
    assert (producer.index.blocks(pod), producer.index.pairs) == (512, 512)
    assert (await begin(producer, ask(long + b"!" * BLOCK), pod)).predicted_cached_tokens == 512 * 64


async def test_a_prediction_is_never_more_than_the_prompt(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    long = bytes(500 * BLOCK + 5)
    end(producer, await begin(producer, ask(long), pod))
    again = await begin(producer, ask(long), pod)
    assert again.predicted_cached_tokens == again.request.prompt.tokens


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


async def test_a_removed_pod_is_forgotten(producer: ApproxPrefixCacheProducer, pod: Endpoint) -> None:
    end(producer, await begin(producer, ask(), pod))
    producer.endpoint_removed(pod)
    assert await held(producer, pod) == 0


async def test_a_pod_that_reports_no_hits_again_and_again_restarts_with_the_last_prompt(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    end(producer, await begin(producer, ask(b"old" * 1000), pod))
    for cached in (None, 0, 0, 0):
        end(producer, await begin(producer, ask(), pod), cached=cached)
    assert await held(producer, pod, ask(b"old" * 1000)) == 0
    assert await held(producer, pod) == 10


async def test_predictions_are_counted_where_the_engine_reports(
    producer: ApproxPrefixCacheProducer, pod: Endpoint
) -> None:
    end(producer, await begin(producer, ask(), pod))
    end(producer, await begin(producer, ask(), pod), cached=600)
    assert producer.index.prediction(pod) == Prediction(640, 600)


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
def test_a_pod_is_remembered_as_far_as_its_kv_cache_goes(
    parameters: dict[str, Any], blocks: int, block_size: int, expected: int
) -> None:
    pod = Endpoint("pod", metrics=Metrics(blocks=blocks, block_size=block_size))
    assert make(**parameters)._capacity(pod) == expected


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
async def test_block_size_and_limits_decide_how_many_blocks_a_prompt_has(
    parameters: dict[str, Any], total: int
) -> None:
    assert (await produced(make(**parameters), ask())).total == total


def test_a_fixed_block_size_must_be_one() -> None:
    with pytest.raises(Invalid, match=r"blockSizeTokens") as invalid:
        make(autoTune=False, blockSizeTokens=0)
    assert invalid.value.problems[0].path == f"plugins.{NAME}"


def test_it_says_where_it_takes_part() -> None:
    points = {point.__name__ for point in points_of(ApproxPrefixCacheProducer)}
    assert points == {"DataProducer", "PreRequest", "PostResponse", "EndpointRemoved"}
    assert not ApproxPrefixCacheProducer.waits
