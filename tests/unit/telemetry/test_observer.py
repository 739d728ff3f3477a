from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.attempt import Ending, Usage
from proxy.core.decision import Decision, ProfileResult, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Declined, RankOutOfRange, Reason, UpstreamFailed
from proxy.telemetry import observer
from proxy.telemetry.observer import BATCH
from tests.helpers.telemetry.fakes import FakeClientRequest, World
from tests.helpers.waiting import PATIENCE


def test_a_complete_stream_is_counted_once_everywhere() -> None:
    world = World()
    world.clock.advance(1.5)
    world.request(world.attempt_of(world.fleet.add("pod-a")))
    seen = world.scrape()
    assert seen["kvlane_requests_total"] == {("sim", "complete", "chat", "2xx"): 1}
    assert seen["kvlane_time_to_first_token_seconds_sum"] == {("sim", "true"): 0.3, ("sim", "false"): 0}
    assert seen["kvlane_time_per_output_token_seconds_sum"]["sim",] == pytest.approx(0.1)
    assert seen["kvlane_request_duration_seconds_sum"] == {("sim",): 1.5}
    assert seen["kvlane_prompt_tokens_total"] == {("sim",): 100}
    assert seen["kvlane_completion_tokens_total"] == {("sim",): 11}
    assert seen["kvlane_cached_tokens_total"] == {("sim",): 64}
    assert seen["kvlane_prefix_actual_prompt_tokens_total"] == {(): 100}
    assert seen["kvlane_prefix_actual_hit_tokens_total"] == {(): 64}
    assert seen["kvlane_scheduling_decisions_total"] == {("pod-a",): 1}
    assert seen["kvlane_scheduling_duration_seconds_count"] == {(): 1}
    assert seen["kvlane_attempts_total"] == {("complete", "pod-a"): 1}
    assert seen["kvlane_retries_total"] == {(): 0}


def test_time_per_token_uses_chunks_if_the_pod_reports_no_tokens() -> None:
    world = World()
    attempt = world.attempt_of(world.fleet.add("pod-a"))
    attempt.usage = None
    world.observer.attempt_ended(attempt)
    seen = world.scrape()
    assert seen["kvlane_time_per_output_token_seconds_sum"]["sim",] == pytest.approx(1.0 / 20)
    assert seen["kvlane_prompt_tokens_total"] == {("sim",): 0}


@pytest.mark.parametrize("change", ["one token", "no stream", "no last byte"])
def test_without_data_there_is_no_time_per_token(change: str) -> None:
    world = World()
    attempt = world.attempt_of(world.fleet.add("pod-a"), stream=change != "no stream")
    if change == "one token":
        attempt.usage = Usage(100, 1)
    if change == "no last byte":
        attempt.last_byte_at = None
    world.observer.attempt_ended(attempt)
    assert world.scrape()["kvlane_time_per_output_token_seconds_count"] == {("sim",): 0}


def test_a_response_in_one_piece_has_its_own_time_to_first_token() -> None:
    world = World()
    world.observer.first_byte(world.attempt_of(world.fleet.add("pod-a"), stream=False))
    assert world.scrape()["kvlane_time_to_first_token_seconds_count"] == {("sim", "true"): 0, ("sim", "false"): 1}


def test_an_error_of_a_pod_has_no_latencies_and_no_tokens() -> None:
    world = World()
    world.request(world.attempt_of(world.fleet.add("pod-a")))
    failed = world.attempt_of(world.fleet.endpoints[0])
    failed.status = 500
    world.request(failed)
    seen = world.scrape()
    assert seen["kvlane_requests_total"]["sim", "complete", "chat", "5xx"] == 1
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert sum(seen[f"kvlane_{name}_seconds_count"].values()) == 1
    assert seen["kvlane_prompt_tokens_total"] == {("sim",): 100}


Given = tuple[str, bool, int | None, Usage | None, float | None]
"""Model, stream, status, usage, and when the last byte came."""

given_attempts = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.booleans(),
    st.sampled_from([200, 201, 399, 400, 503, None]),
    st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9)) | st.none(),
    st.sampled_from([2.0, None]),
)


@given(st.lists(given_attempts, max_size=12))
def test_counting_in_batches_equals_counting_one_by_one(given: list[Given]) -> None:
    together, alone = World(), World()
    for world in (together, alone):
        endpoint = world.fleet.add("pod-a")
        for model, stream, status, usage, last in given:
            attempt = world.attempt_of(endpoint, model, stream=stream)
            attempt.status, attempt.usage, attempt.last_byte_at = status, usage, last
            if status is not None:
                world.observer.first_byte(attempt)
            world.observer.attempt_ended(attempt)
            if world is alone:
                world.observer.flush()
    batch, single = together.scrape(), alone.scrape()
    for name in (
        *("prompt_tokens_total", "completion_tokens_total", "cached_tokens_total"),
        *("prefix_actual_prompt_tokens_total", "prefix_actual_hit_tokens_total", "attempts_total"),
        *("time_to_first_token_seconds_count", "time_to_first_token_seconds_sum"),
        *("time_per_output_token_seconds_count", "time_per_output_token_seconds_sum"),
    ):
        assert batch[f"kvlane_{name}"] == pytest.approx(single[f"kvlane_{name}"])
    whole = {model: [one for one in given if one[0] == model and one[2] in (200, 201, 399)] for model in "abc"}
    assert batch["kvlane_completion_tokens_total"] == {
        (model,): sum(usage.completion_tokens for _, _, _, usage, _ in responded if usage)
        for model, responded in whole.items()
        if responded
    }


def test_a_pod_without_cached_tokens_does_not_dilute_the_hit_ratio() -> None:
    world = World()
    attempt = world.attempt_of(world.fleet.add("pod-a"))
    attempt.usage = Usage(100, 11, None)
    world.observer.attempt_ended(attempt)
    seen = world.scrape()
    assert seen["kvlane_prefix_actual_prompt_tokens_total"] == {(): 0}
    assert seen["kvlane_prompt_tokens_total"] == {("sim",): 100}


def test_predicted_hits_are_counted_with_their_prompts() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    predicted, unpredicted = world.attempt_of(endpoint), world.attempt_of(endpoint)
    predicted.predicted_cached_tokens = 48
    world.observer.attempt_ended(predicted)
    world.observer.attempt_ended(unpredicted)
    seen = world.scrape()
    assert seen["kvlane_prefix_predicted_prompt_tokens_total"] == {(): 100}
    assert seen["kvlane_prefix_predicted_hit_tokens_total"] == {(): 48}


def test_a_second_attempt_is_a_retry_and_both_are_counted() -> None:
    world = World()
    first = world.attempt_of(world.fleet.add("pod-a"))
    first.status, first.ending = None, Ending.UPSTREAM_FAILED
    world.observer.attempt_ended(first)
    world.observer.attempt_ended(world.attempt_of(world.fleet.add("pod-b"), number=1))
    seen = world.scrape()
    assert seen["kvlane_retries_total"] == {(): 1}
    assert seen["kvlane_attempts_total"] == {("upstream-failed", "pod-a"): 1, ("complete", "pod-b"): 1}


@pytest.mark.parametrize(
    ("status", "error", "ending", "counted"),
    [
        (None, Declined(429), Ending.UPSTREAM_FAILED, "complete"),
        (None, Declined(404), Ending.UPSTREAM_FAILED, "complete"),
        (None, RankOutOfRange(4, 4, "no such rank"), Ending.UPSTREAM_FAILED, "complete"),
        (None, Declined(503), Ending.UPSTREAM_FAILED, "upstream-failed"),
        (500, None, Ending.COMPLETE, "upstream-failed"),
        (429, None, Ending.COMPLETE, "complete"),
        (500, None, Ending.CLIENT_GONE, "client-gone"),
    ],
)
@pytest.mark.parametrize("for_client", [True, False], ids=["response", "stage"])
def test_a_5xx_of_a_pod_is_its_failure_and_a_4xx_is_not_whether_or_not_it_is_retried(
    status: int | None, error: UpstreamFailed | None, ending: Ending, counted: str, for_client: bool
) -> None:
    world = World()
    attempt = world.attempt_of(world.fleet.add("pod-a"))
    attempt.status, attempt.ending, attempt.for_client = status, ending, for_client
    world.observer.attempt_ended(attempt, error)
    assert world.scrape()["kvlane_attempts_total"] == {(counted, "pod-a"): 1}
    assert attempt.ending is ending, "the prefix index and the latency model see the ending itself"


def test_a_5xx_of_envoy_is_no_failure_of_the_pod() -> None:
    world = World()
    attempt = world.attempt_of(world.fleet.add("pod-a"))
    attempt.status, attempt.is_by_envoy = 503, True
    world.observer.attempt_ended(attempt)
    assert world.scrape()["kvlane_attempts_total"] == {("complete", "pod-a"): 1}


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (Reason.UNKNOWN_MODEL, "refused"),
        (Reason.UPSTREAM_FAILED, "upstream-failed"),
        (Reason.UPSTREAM_TIMED_OUT, "timed-out"),
    ],
)
def test_a_refusal_is_counted_by_reason_and_as_an_outcome(reason: Reason, outcome: str) -> None:
    world = World()
    world.observer.request_ended(FakeClientRequest(), 503, reason, None, 0)
    seen = world.scrape()
    assert seen["kvlane_refused_total"] == {(reason.value,): 1}
    assert seen["kvlane_requests_total"] == {("", outcome, "chat", "5xx"): 1}


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/v1/responses/resp_123/cancel", "responses"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/chat/completionsX", "other"),
        ("/wp-login.php", "other"),
    ],
)
def test_paths_are_grouped_so_that_ids_and_scanners_add_no_series(path: str, group: str) -> None:
    world = World()
    world.observer.request_ended(FakeClientRequest(path), 404, Reason.UNKNOWN_PATH, None, 0)
    assert world.scrape()["kvlane_requests_total"] == {("", "refused", group, "4xx"): 1}


def test_a_model_becomes_a_label_after_a_response_of_a_pod_for_it() -> None:
    world = World()
    invented = world.attempt_of(world.fleet.add("pod-a"), model="invented")
    invented.status = 404
    world.request(invented)
    seen = world.scrape()
    assert seen["kvlane_requests_total"] == {("other", "complete", "chat", "4xx"): 1}
    assert "invented" not in seen.text


@pytest.mark.parametrize("made_up", ["x" * 257, "\ud800"])
def test_an_unusable_name_is_no_label_even_if_a_pod_responds_for_it(made_up: str) -> None:
    world = World()
    world.request(world.attempt_of(world.fleet.add("pod-a"), model=made_up))
    assert world.scrape()["kvlane_prompt_tokens_total"] == {("other",): 100}


def test_models_beyond_the_limit_are_one_series() -> None:
    world = World(limit=3)
    endpoint = world.fleet.add("pod-a")
    for number in range(10):
        world.request(world.attempt_of(endpoint, model=f"model-{number}"))
    seen = world.scrape()
    assert seen["kvlane_prompt_tokens_total"] == {
        ("model-0",): 100, ("model-1",): 100, ("model-2",): 100, ("other",): 700
    }  # fmt: skip
    assert seen["kvlane_requests_total"]["other", "complete", "chat", "2xx"] == 7


def test_faults_of_scorers_and_disagreement_of_shadows_are_counted() -> None:
    world = World()
    a, b = world.fleet.add("pod-a"), world.fleet.add("pod-b")
    world.observer.plugin_fault("my-scorer", "nan")
    world.observer.shadow(Decision(a), ProfileResult("candidate", (ScoredEndpoint(a, 1.0),)))
    world.observer.shadow(Decision(a), ProfileResult("candidate", (ScoredEndpoint(b, 1.0),)))
    seen = world.scrape()
    assert seen["kvlane_scorer_faults_total"] == {("nan", "my-scorer"): 1}
    assert seen["kvlane_shadow_decisions_total"] == {("true", "candidate"): 1, ("false", "candidate"): 1}


def test_the_first_byte_of_a_running_stream_is_counted() -> None:
    world = World()
    world.observer.first_byte(world.attempt_of(world.fleet.add("pod-a")))
    assert world.scrape()["kvlane_time_to_first_token_seconds_count"]["sim", "true"] == 1


def test_every_request_has_its_model_although_its_attempt_was_in_an_earlier_batch() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    for _ in range(3):
        failed = world.attempt_of(endpoint)
        failed.status = 500
        world.observer.first_byte(failed)
        world.observer.attempt_ended(failed)
    for number in range(2 * BATCH + 1):
        world.request(world.attempt_of(endpoint, model=f"model-{number}"))
    assert ("other", "complete", "chat", "2xx") not in world.scrape()["kvlane_requests_total"]


async def test_the_event_loop_runs_between_two_batches() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    for _ in range(BATCH + 1):
        world.observer.attempt_ended(world.attempt_of(endpoint))
    settling = asyncio.get_running_loop().create_task(world.observer.flush_in_batches())
    seen = []
    while not settling.done():
        seen.append(world.series.of(endpoint).attempts.get("complete", 0))
        await asyncio.sleep(0)
    assert set(seen) == {0, BATCH, BATCH + 1}


async def test_concurrent_settlements_count_once_and_completely() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    for _ in range(3 * BATCH):
        world.request(world.attempt_of(endpoint))
    async with asyncio.TaskGroup() as group:
        group.create_task(world.observer.flush_in_batches())
        await asyncio.sleep(0)
        world.request(world.attempt_of(endpoint))
        await world.observer.flush_in_batches()
        assert world.series.of(endpoint).attempts == {"complete": 3 * BATCH + 1}
        assert world.series.of(endpoint).decisions == 3 * BATCH + 1
    body, _ = await world.exposition.render("")
    assert b'kvlane_requests_total{model="sim",outcome="complete",path="chat",status="2xx"} 769.0' in body


async def test_a_failed_batch_is_reported_and_the_next_one_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observer, "INTERVAL", 0.001)
    world = World()
    endpoint = world.fleet.add("pod-a")
    running = asyncio.get_running_loop().create_task(world.observer.run())
    strange = world.attempt_of(endpoint)
    strange.first_byte_at = cast(float, "soon")
    world.observer.attempt_ended(strange)
    async with asyncio.timeout(PATIENCE):
        while not caplog.records:
            await asyncio.sleep(0.001)
        world.observer.attempt_ended(world.attempt_of(endpoint))
        while not world.series.of(endpoint).attempts:
            await asyncio.sleep(0.001)
    running.cancel()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_no_request_or_body_is_kept() -> None:
    world = World()
    world.request(world.attempt_of(world.fleet.add("pod-a")))
    kept = [
        *world.observer._decided,
        *world.observer._first_bytes,
        *world.observer._attempts,
        *world.observer._requests,
    ]
    assert len(kept) == 4
    assert all(isinstance(value, str | int | float | Ending | Endpoint | Usage | None) for value in flat(kept))


def flat(values: Iterable[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, tuple):
            yield from flat(value)
        else:
            yield value
