"""If one pod computes a prompt and another decodes, each shows its own stage and nothing else."""

import pytest

from proxy.core.attempt import Attempt, Ending, Stage
from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.latency.pod import LATER_PER_QUEUED, Work
from proxy.latency.rates import FleetModel
from tests.helpers.latency.pods import Pod, respond


def start(pod: Pod, stage: Stage, tokens: int, stream: bool = True) -> tuple[Attempt, Work]:
    """An attempt that was sent now; a prefill does not stream."""
    attempt = pod.send(0 if stage is Stage.DECODE else tokens, stream and stage is not Stage.PREFILL)
    attempt.stage, attempt.for_client = stage, stage is not Stage.PREFILL
    uncached = 0 if stage is Stage.DECODE else tokens
    return attempt, pod.model.dispatch_stage(attempt, uncached, tokens, pod.now)


def finish(pod: Pod, begun: tuple[Attempt, Work]) -> None:
    attempt, work = begun
    attempt.ending = Ending.COMPLETE
    pod.endpoint.charge(-1, 0)
    pod.model.end(work, pod.now)


def prefill(pod: Pod, tokens: int, held: float = 0.0) -> None:
    """It responds when the prompt is computed, and `held` seconds later."""
    begun = start(pod, Stage.PREFILL, tokens)
    pod.now += pod.takes(tokens)
    respond(begun[0], pod.now)
    begun[0].ending = None
    pod.now += held
    finish(pod, begun)
    pod.now += 0.5


def decode(pod: Pod, tokens: int, per_token: float, wait: float = 3.0, stream: bool = True) -> None:
    """A response that begins when the prompt has been computed elsewhere."""
    begun = start(pod, Stage.DECODE, 4000, stream)
    pod.now += wait
    first = pod.now
    pod.model.catch_up(pod.now)
    pod.now += (tokens - 1) * per_token
    respond(begun[0], pod.now, tokens)
    begun[0].first_byte_at = first if stream else pod.now - 0.001
    finish(pod, begun)
    pod.now += 0.5


def test_a_prefill_attempt_is_all_prefill() -> None:
    pod = Pod(per_token=63e-6)
    for tokens in (300, 7000, 2500, 900, 4800) * 12:
        prefill(pod, tokens)
    assert pod.error() < 0.05
    assert pod.error(500) < 0.3


def test_waiting_for_the_transfer_is_not_prefill() -> None:
    pod = Pod()
    for tokens in (300, 7000, 2500, 900, 4800) * 12:
        prefill(pod, tokens, held=2.0)
    assert pod.error() < 0.05


def test_prefills_queue_like_other_prompts() -> None:
    one, other = Pod(), Pod()
    start(one, Stage.PREFILL, 4000)
    other.model.dispatch(other.send(4000), 4000, 4000, 0.0)
    assert one.ttft(1000, 0.1) == pytest.approx(other.ttft(1000, 0.1))
    assert one.ttft(1000, 9.0) == pytest.approx(other.ttft(1000, 9.0)), "overdue, and as long expected"


def test_one_token_does_not_affect_the_length_of_responses() -> None:
    fleet = FleetModel()
    pod, output = Pod(fleet), fleet.output
    for _ in range(50):
        prefill(pod, 4000)
    assert fleet.output == output
    assert fleet.prompt == pytest.approx(4000, rel=0.4)


def test_a_decode_pod_that_waits_for_a_transfer_delays_no_prompt() -> None:
    pod, idle = Pod(), Pod()
    for _ in range(3):
        start(pod, Stage.DECODE, 8000)
    assert pod.ttft(1000, 0.0) - idle.ttft(1000, 0.0) < 0.03, "a step or so"
    assert pod.ttft(1000, 5.0) - idle.ttft(1000, 5.0) < 0.03, "and no later, however long they wait"


def test_the_first_byte_of_a_decode_attempt_shows_no_prefill() -> None:
    pod = Pod()
    pod.work(60)
    for _ in range(60):
        decode(pod, 2, 0.01, wait=9.0)
    assert pod.error() < 0.05


@pytest.mark.parametrize("wait", [0.1, 9.0])
def test_the_pace_of_a_decode_attempt_is_learnt(wait: float) -> None:
    pod = Pod()
    for _ in range(60):
        decode(pod, 200, 0.04, wait)
    pod.model.catch_up(pod.now)
    assert pod.tpot() == pytest.approx(0.04, rel=0.1)


def test_delays_by_prompts_are_not_its_pace() -> None:
    pod = Pod(per_token=100e-6)
    pod.work(40)
    for _ in range(60):
        begun = start(pod, Stage.DECODE, 4000)
        first = pod.now + 0.01
        pod.serve([10_000, 10_000])
        pod.now = max(pod.now, first) + 100 * 0.02
        respond(begun[0], pod.now, 101)
        begun[0].first_byte_at = first
        finish(pod, begun)
        pod.now += 0.5
    pod.model.catch_up(pod.now)
    assert pod.tpot() == pytest.approx(0.02, rel=0.35), "and not twice as much"


def test_a_complete_response_shows_no_pace() -> None:
    pod, untaught = Pod(), Pod()
    for _ in range(30):
        decode(pod, 200, 0.3, stream=False)
    pod.model.catch_up(pod.now)
    assert pod.tpot() == pytest.approx(untaught.tpot())


def test_the_length_of_responses_is_learnt() -> None:
    fleet = FleetModel()
    pod = Pod(fleet)
    for _ in range(200):
        decode(pod, 50, 0.01)
    assert fleet.output == pytest.approx(50, rel=0.1)


def test_requests_that_wait_for_a_transfer_are_not_other_clients() -> None:
    pod, idle = Pod(), Pod()
    for _ in range(5):
        start(pod, Stage.DECODE, 4000)
    scrape = Metrics(waiting=5, scraped_at=0.5, freshness=Freshness.FRESH)
    pod.endpoint.publish(scrape, 5)
    assert pod.ttft(1000, 1.0) - idle.ttft(1000, 1.0) < 0.03


class TestDelay:
    """Total seconds by which a prompt delays running responses."""

    def pod(self, running: int = 0) -> Pod:
        pod = Pod(endpoint=Endpoint("pod"))
        pod.work(60)
        pod.endpoint.publish(Metrics(running=running, freshness=Freshness.FRESH, scraped_at=pod.now), 0)
        pod.model.catch_up(pod.now)
        return pod

    def test_without_running_responses_none_is_delayed(self) -> None:
        assert self.pod().model.delay(4000, 4000) == 0.0

    def test_each_running_response_waits_for_the_prefill(self) -> None:
        pod = self.pod(running=5)
        assert pod.model.delay(4000, 4000) == pytest.approx(5 * 0.4, rel=0.2)
        assert pod.model.delay(8000, 8000) == pytest.approx(2 * pod.model.delay(4000, 4000), rel=0.2)
        assert pod.model.delay(400, 4000) < 0.2 * pod.model.delay(4000, 4000)

    def test_a_longer_queue_predicts_more_prompts_behind(self) -> None:
        pod, delays = self.pod(), []
        for _ in range(3):
            delays.append(pod.model.delay(4000, 4000))
            start(pod, Stage.PREFILL, 4000)
            pod.model.catch_up(pod.now)
        assert delays == pytest.approx([0.0, LATER_PER_QUEUED * 0.4, 2 * LATER_PER_QUEUED * 0.4], rel=0.2)

    def test_a_future_response_of_a_split_request_counts(self) -> None:
        pod = self.pod()
        start(pod, Stage.DECODE, 4000)
        for scraped in (False, True):
            if scraped:
                pod.endpoint.publish(Metrics(freshness=Freshness.FRESH, scraped_at=pod.now), 1)
            pod.model.catch_up(pod.now)
            assert pod.model.delay(4000, 4000) == pytest.approx(0.4, rel=0.2)

    def test_a_started_response_runs_and_a_transfer_that_waits_does_not(self) -> None:
        pod = self.pod()
        (answering, _), (computed, _) = start(pod, Stage.DECODE, 4000), start(pod, Stage.PREFILL, 4000)
        pod.now += 1.0
        for attempt in (answering, computed):
            attempt.status, attempt.first_byte_at = 200, pod.now
        pod.model.catch_up(pod.now)
        assert pod.model.delay(4000, 4000) == pytest.approx(0.4, rel=0.2)
