"""Requests that are dispatched, queued, refused or evicted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from proxy.core.attempt import Attempt, Stage, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, update
from proxy.core.errors import FlowControlRefusal, Reason
from proxy.core.params import Duration, Size
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest, Prompt
from proxy.fleet.store import Pods
from proxy.flowcontrol.controller import WAITED_HEADER, FlowControl, FlowSeries
from proxy.flowcontrol.queue import QueueEntry
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings, Saturation


class Watcher(FlowSeries):
    def __init__(self) -> None:
        self.gone_on: list[str] = []
        self.not_served: list[tuple[str, str]] = []
        self.has_ended = False

    def admitted(self, band: str, waited: float) -> None:
        self.gone_on.append(band)

    def refused(self, band: str, reason: Reason) -> None:
        self.not_served.append((band, reason.value))

    def end(self) -> None:
        self.has_ended = True


class World:
    """A gate before pods; a request that went on is on the pod with the fewest at once, until it is let go."""

    def __init__(self, pods: Sequence[Endpoint] = (), **settings: Any) -> None:
        self.clock = ManualClock(now=50.0)
        self.pods = list(pods) or [Endpoint("a", state=EndpointState.READY), Endpoint("b", state=EndpointState.READY)]
        self.watcher = Watcher()
        self.usage: Usage | None = None
        self.order: list[str] = []
        self.queries = 0
        """Number of searches for pods."""
        self.refused: dict[str, FlowControlRefusal] = {}
        self.headers: dict[str, list[tuple[str, str]]] = {}
        self._doors: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.control = FlowControl(FlowControlSettings(**settings), cast(Pods, self), self.clock, self.watcher)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return self.pods

    def endpoints_for(self, model: str) -> Sequence[Endpoint]:
        self.queries += 1
        return [pod for pod in self.pods if pod.models is None or model in pod.models]

    async def come(self, *names: str, **fields: Any) -> None:
        """Requests, one after the other."""
        for name in names:
            tokens = fields.pop("tokens", 1)
            request = InferenceRequest(
                name,
                "/",
                fields.get("model", "m"),
                Prompt((b"x" * 4 * tokens,)),
                fields.get("body", b"body"),
                fields.get("headers", {}),
                **{key: value for key, value in fields.items() if key not in ("model", "headers", "body")},
            )
            self._doors[name] = asyncio.Event()
            self._tasks[name] = asyncio.ensure_future(self._serve(name, request))
            await self.settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._doors[name].set()
            await self.settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for _ in range(3):
            await self.leave(*self._doors)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def names(self) -> str:
        return "".join(self.order)

    async def _serve(self, name: str, request: InferenceRequest) -> None:
        try:
            async with self.control.admit(request):
                self.order.append(name)
                pod = min(
                    self.control.narrow(request, self.endpoints_for(request.model)), key=lambda one: one.load.requests
                )
                attempt = Attempt(request, Decision(pod), pod, 0, self.clock.now())
                attempt.charge = (request.prompt.tokens, 0)
                attempt.status, attempt.usage = 200, self.usage
                pod.charge(1, request.prompt.tokens)
                self.control.attempt_started(attempt)
                self.headers[name] = attempt.response_headers
                try:
                    await self._doors[name].wait()
                finally:
                    pod.charge(-1, -request.prompt.tokens)
        except FlowControlRefusal as error:
            self.refused[name] = error


@asynccontextmanager
async def world(pods: Sequence[Endpoint] = (), **settings: Any) -> AsyncIterator[World]:
    it = World(pods, **settings)
    try:
        yield it
    finally:
        await it.end()
        assert it.control.queue.length == 0
        assert it.control.queue.bytes == 0
        assert not it.control._inside
        assert all(pod.load.requests == 0 for pod in it.pods)


async def test_requests_proceed_up_to_the_cap_and_the_others_as_those_end() -> None:
    async with world(max_concurrent=2) as it:
        await it.come("a", "b", "c", "d")
        assert it.names == "ab"
        await it.leave("b")
        assert it.names == "abc"
        await it.leave("a", "c")
        assert it.names == "abcd"


async def test_a_cap_per_pod_is_kept_on_every_pod() -> None:
    async with world(max_concurrent_per_pod=2) as it:
        await it.come(*"abcdef")
        assert it.names == "abcd"
        assert [pod.load.requests for pod in it.pods] == [2, 2]


async def test_tokens_in_flight_are_capped_and_a_prompt_beyond_the_cap_goes_alone() -> None:
    async with world([Endpoint("a", state=EndpointState.READY)], max_tokens_per_pod=100) as it:
        await it.come("a", tokens=60)
        await it.come("b", tokens=60)
        await it.come("c", tokens=500)
        assert it.names == "a"
        await it.leave("a")
        assert it.names == "ab"
        await it.leave("b")
        assert it.names == "abc"
    async with world(max_tokens=100) as it:
        await it.come("a", tokens=60)
        await it.come("b", tokens=60)
        assert it.names == "a"


async def test_higher_priorities_are_first() -> None:
    async with world(max_concurrent=1, bands=(BandSettings(10), BandSettings(0))) as it:
        await it.come("x")
        await it.come("l", priority=-5)
        await it.come("n", priority=5)
        await it.come("h", priority=10)
        await it.come("u", priority=99)
        await it.leave("x", "u", "h", "n")
        assert it.names == "xuhnl"


async def test_a_band_with_a_lower_ceiling_waits_while_others_proceed() -> None:
    saturation = Saturation("concurrency", requests=2)
    bands = (BandSettings(10), BandSettings(0, ceiling=0.5))
    async with world(saturation=saturation, bands=bands) as it:
        await it.come("a", "b", "c")
        assert it.names == "ab", "half of what fits"
        await it.come("d", priority=10)
        assert it.names == "abd"


async def test_reflective_ceilings_reduce_lower_bands_as_pods_fill_up() -> None:
    saturation = Saturation("concurrency", requests=5)
    bands = (BandSettings(10), BandSettings(0), BandSettings(-1))
    async with world(saturation=saturation, bands=bands, ceilings="reflective") as it:
        await it.come(*"abcdefgh", priority=10)
        await it.come("l", priority=-1)
        assert it.names == "abcdefghl", "at 8 of 10 one turn of four is for those at their ceilings: this is the fourth"
        await it.come("m", priority=0)
        await it.leave("a", "b")
        assert it.names == "abcdefghl", "7 of 10 is above 0.65, the ceiling of the middle"
        await it.leave("c")
        assert it.names == "abcdefghlm", "6 of 10 is below 0.7"
        await it.come("n", "o", "p", priority=10)
        await it.come("q", priority=10)
        assert it.names == "abcdefghlmnop", "what is full is full for the highest too"


@asynccontextmanager
async def nearly_full() -> AsyncIterator[World]:
    """Two bands and a pod that reports a saturation of 0.9 until the end."""
    pod = Endpoint("a", state=EndpointState.READY)
    pod.publish(replace(pod.metrics, kv_usage=0.72, freshness=Freshness.FRESH), 0)
    saturation = Saturation("utilization", queue_depth=1000)
    async with world(
        [pod], saturation=saturation, bands=(BandSettings(0), BandSettings(-1)), ceilings="reflective"
    ) as it:
        yield it
        pod.publish(replace(pod.metrics, kv_usage=0.0), 0)


async def test_a_band_at_its_reflective_ceiling_gets_one_request_in_nine_at_a_saturation_of_0_9() -> None:
    async with nearly_full() as it:
        await it.come(*(f"l{number}" for number in range(9)), priority=-1)
        for number in range(36):
            await it.come(f"h{number}")
            it.control.admit_waiting()
            await it.settle()
        lows = [place for place, name in enumerate(it.order) if name[0] == "l"]
        assert [later - earlier for earlier, later in itertools.pairwise(lows)] == [9] * (len(lows) - 1)
        assert len(lows) == 5


async def test_reports_of_pods_are_no_turns_of_reflective_ceilings() -> None:
    async with nearly_full() as it:
        await it.come("h")
        await it.come("l", "m", priority=-1)
        for _ in range(100):
            it.control.admit_waiting()
        await it.settle()
        assert it.names == "h"


async def test_a_band_at_its_reflective_ceiling_gets_turns_while_no_other_request_proceeds() -> None:
    async with nearly_full() as it:
        await it.come("h")
        await it.come("l", "m", priority=-1)
        order = []
        for _ in range(20):
            it.clock.advance(0.00101)
            it.control.admit_waiting()
            await it.settle()
            order.append(it.names)
        assert order == ["h"] * 7 + ["hl"] * 8 + ["hlm"] * 5, "a millisecond is a turn"


async def test_requests_of_the_lowest_band_alone_fill_the_pods_under_reflective_ceilings() -> None:
    bands = (BandSettings(0), BandSettings(-1))
    saturation = Saturation("concurrency", requests=10)
    async with world(saturation=saturation, bands=bands, ceilings="reflective") as it:
        for name in "abcdefghijklmnopqrst":
            it.clock.advance(0.05)
            await it.come(name, priority=-1)
        assert it.names == "abcdefghijklmnopqrst"


async def test_a_single_band_has_all_capacity_under_reflective_ceilings() -> None:
    async with world(saturation=Saturation("concurrency", requests=2), ceilings="reflective") as it:
        await it.come(*"abcde")
        assert it.names == "abcd"


async def test_pods_that_report_queues_are_full_until_they_report_less() -> None:
    pod = Endpoint("a", state=EndpointState.READY)
    async with world([pod], saturation=Saturation("utilization", queue_depth=5)) as it:
        await it.come("a")
        assert it.names == "", "nothing is known of a pod that never reported"
        pod.publish(replace(pod.metrics, waiting=6, freshness=Freshness.FRESH), 0)
        it.control.admit_waiting()
        await it.settle()
        assert it.names == ""
        pod.publish(replace(pod.metrics, waiting=1), 0)
        it.control.admit_waiting()
        await it.settle()
        assert it.names == "a"


async def test_requests_that_ended_since_the_scrape_do_not_shorten_the_reported_queue() -> None:
    pod = Endpoint("a", state=EndpointState.READY)
    async with world([pod], saturation=Saturation("utilization", queue_depth=5)) as it:
        pod.publish(replace(pod.metrics, waiting=5, freshness=Freshness.FRESH), 3)
        assert it.control.capacity.saturation() == 1.0


@pytest.mark.parametrize(("waiting", "requests", "saturation"), [(4, 1, 0.8), (1, 9, 0.9), (0, 0, 0.0)])
async def test_of_both_measures_the_higher_counts(waiting: int, requests: int, saturation: float) -> None:
    pod = Endpoint("a", state=EndpointState.READY)
    async with world([pod], saturation=Saturation("highest", queue_depth=5, requests=10)) as it:
        pod.publish(replace(pod.metrics, waiting=waiting, freshness=Freshness.FRESH), requests)
        pod.charge(requests, 0)
        assert it.control.capacity.saturation() == pytest.approx(saturation)
        pod.charge(-requests, 0)


@pytest.mark.parametrize(
    ("roles", "saturation"),
    [
        (("", "", ""), 0.5),
        (("decode", "decode", "decode"), 0.5),
        (("prefill", "prefill", "decode"), 1.2),
        (("prefill", "decode", "both"), 0.75),
        (("encode", "decode", ""), 0.75),
        (("encode", "encode-prefill", "prefill"), 0.75),
        (("encode", "encode", "encode"), 0.5),
        (("unknown", "encode", "unknown"), 0.5),
    ],
)
async def test_the_fuller_one_of_prefill_and_decode_counts(roles: tuple[str, ...], saturation: float) -> None:
    pods = [Endpoint(str(at), role=role, state=EndpointState.READY) for at, role in enumerate(roles)]
    async with world(pods, saturation=Saturation("concurrency", requests=10)) as it:
        for pod, requests in zip(pods, (0, 3, 12), strict=True):
            pod.charge(requests, 0)
        assert it.control.capacity.saturation() == pytest.approx(saturation)
        for pod, requests in zip(pods, (0, 3, 12), strict=True):
            pod.charge(-requests, 0)


async def test_saturation_is_0_without_a_detector() -> None:
    async with world(saturation=Saturation("none")) as it:
        assert it.control.capacity.saturation() == 0.0


async def test_requests_that_leave_the_queue_together_cause_one_search_for_pods() -> None:
    async def searches(leaving: int) -> int:
        async with world(max_concurrent=1) as it:
            await it.come("x", *(f"{number}" for number in range(20)))
            before = it.queries
            for number in range(leaving):
                it._tasks[f"{number}"].cancel()
            await it.settle()
            return it.queries - before

    assert await searches(10) == await searches(1)


@pytest.mark.parametrize(
    ("fairness", "order"), [("strict", "aaabbb"), ("round-robin", "ababab"), ("deficit-round-robin", "abbbaa")]
)
async def test_tenants_of_a_band_share_by_the_configured_fairness(fairness: str, order: str) -> None:
    async with world(max_concurrent=1, fairness=fairness) as it:
        await it.come("x")
        for number in range(3):
            await it.come(f"a{number}", tenant="a", tokens=40)
        for number in range(3):
            await it.come(f"b{number}", tenant="b", tokens=10)
        await it.leave("x", *(f"{tenant}{number}" for number in range(3) for tenant in "ab"))
        for _ in range(6):
            await it.leave(*it.order)
        assert "".join(name[0] for name in it.order[1:]) == order


async def test_service_counts_when_the_response_has_ended() -> None:
    async with world(max_concurrent=1, fairness="least-service") as it:
        it.usage = Usage(100, 1000)
        await it.come("a", tenant="long")
        it.usage = Usage(100, 10)
        await it.come("b", tenant="short")
        await it.leave("a")
        await it.come("c", tenant="long")
        await it.come("d", tenant="short")
        await it.leave("b")
        assert it.names == "abd"


async def test_cached_tokens_cost_the_tenant_nothing() -> None:
    async with world(max_concurrent=1, fairness="deficit-round-robin") as it:
        await it.come("x")
        await it.come("a0", "a1", tenant="a", tokens=100)
        await it.come("b0", "b1", tenant="b", tokens=100)
        await it.leave("x")
        next(iter(it.control._inside)).entry.recount(1)
        await it.leave("a0")
        assert it.order == ["x", "a0", "b0"]
        await it.leave("b0")
        assert it.order == ["x", "a0", "b0", "a1"], "b has had a hundred tokens, a one"


async def test_deadlines_and_objectives_order_the_queue() -> None:
    async with world(max_concurrent=1, ordering="edf") as it:
        await it.come("x")
        await it.come("a", deadline=200.0)
        await it.come("b", deadline=100.0)
        await it.leave("x")
        assert it.names == "xb"
    async with world(max_concurrent=1, ordering="slo-deadline") as it:
        await it.come("x")
        await it.come("a")
        await it.come("b", received_at=50.0, headers={"x-slo-ttft-ms": "900"})
        await it.come("c", received_at=50.0, headers={"x-llm-d-slo-ttft-ms": "500"})
        await it.leave("x", "c", "b")
        assert it.names == "xcba"


async def test_a_model_without_capacity_does_not_block_others() -> None:
    pods = [Endpoint("a", state=EndpointState.READY, models=frozenset("m"))]
    pods.append(Endpoint("b", state=EndpointState.READY, models=frozenset("n")))
    async with world(pods, max_concurrent_per_pod=1) as it:
        await it.come("a", "b", model="m", tenant="m")
        await it.come("c", "d", model="n", tenant="n")
        assert it.names == "ac"
        await it.leave("c")
        assert it.names == "acd"


@pytest.mark.parametrize("queued", [1, 5])
async def test_a_model_without_capacity_does_not_block_others_under_a_cap_of_tokens(queued: int) -> None:
    pods = [Endpoint("a", state=EndpointState.READY, models=frozenset("m"))]
    pods.append(Endpoint("b", state=EndpointState.READY, models=frozenset("n")))
    async with world(pods, max_tokens=1_000_000, max_concurrent_per_pod=1, max_queued=queued) as it:
        await it.come("a", "b", model="m")
        await it.come("c", model="n")
        assert it.names == "ac"
        assert it.refused == {}


async def test_requests_for_a_model_without_pods_are_not_queued() -> None:
    async with world([Endpoint("a", models=frozenset("m"))], max_concurrent_per_pod=1) as it:
        await it.come("a", "b", model="other")
        assert it.names == "ab", "the gateway says what is wrong"


async def test_the_queue_is_bounded_in_requests_and_bytes() -> None:
    async with world(max_concurrent=1, max_queued=1) as it:
        await it.come("a", "b", "c")
        assert list(it.refused) == ["c"]
        assert it.refused["c"].reason is Reason.SATURATED
    async with world(max_concurrent=1, max_queued_bytes=6) as it:
        await it.come("a", "b", "c")
        assert list(it.refused) == ["c"]
    async with world(max_concurrent=1, bands=(BandSettings(0, max_queued=0), BandSettings(-1))) as it:
        await it.come("a", "b")
        await it.come("c", priority=-1)
        assert list(it.refused) == ["b"]


async def test_a_client_may_shorten_the_queue_timeout() -> None:
    async with world(max_concurrent=1, queue_timeout=30.0) as it:
        await it.come("a")
        await it.come("b", headers={"x-llm-d-inference-ttl": "20ms"})
        await it.come("c")
        await asyncio.sleep(0.05)
        await it.settle()
        assert list(it.refused) == ["b"]
        assert it.refused["b"].reason is Reason.TTL_EXPIRED
        assert "within 0.02 s" in str(it.refused["b"])


@pytest.mark.parametrize(
    ("given", "seconds"), [("1500ms", 1.5), ("1m", 30.0), ("0s", 30.0), ("0", 30.0), ("soon", 30.0), ("-1s", 30.0)]
)
async def test_only_a_positive_and_shorter_time_in_the_queue_counts(given: str, seconds: float) -> None:
    async with world(max_concurrent=1, queue_timeout=30.0) as it:
        await it.come("a", "b")
        request = InferenceRequest("r", "/", "m", headers={"x-llm-d-inference-ttl": given})
        assert it.control.queue.bands[0].timeout_of(request) == seconds


async def test_a_request_that_exceeds_the_queue_timeout_is_refused() -> None:
    async with world(max_concurrent=1, queue_timeout=0.02) as it:
        await it.come("a", "b")
        await asyncio.sleep(0.05)
        await it.settle()
        assert it.refused["b"].reason is Reason.TTL_EXPIRED
        await it.leave("a")
        assert it.names == "a"


async def test_responses_state_the_time_in_the_queue() -> None:
    async with world(max_concurrent=1) as it:
        await it.come("a", "b")
        it.clock.advance(1.2345)
        await it.leave("a")
        assert it.headers == {"a": [(WAITED_HEADER, "0")], "b": [(WAITED_HEADER, "1234")]}


class TestWithoutAReadyPod:
    async def test_requests_wait_for_the_first_one(self) -> None:
        async with world(no_endpoint_timeout=30.0) as it:
            pods, it.pods = it.pods, []
            await it.come("a", "b")
            assert it.control.queue.length == 2
            it.pods = pods
            it.control.admit_waiting()
            await it.settle()
            assert (it.names, it.refused) == ("ab", {})

    async def test_they_are_refused_with_503_when_none_becomes_ready(self) -> None:
        async with world(no_endpoint_timeout=0.02, queue_timeout=30.0) as it:
            it.pods = []
            await it.come("a")
            await asyncio.sleep(0.05)
            await it.settle()
            refusal = it.refused["a"]
            assert (refusal.status, refusal.code, refusal.reason) == (503, "no_endpoints", Reason.NO_ENDPOINTS)
            assert it.watcher.not_served == [("0", "rejected-no-endpoints")]

    async def test_a_client_may_shorten_the_wait(self) -> None:
        async with world(no_endpoint_timeout=30.0) as it:
            it.pods = []
            await it.come("a", headers={"x-llm-d-inference-ttl": "20ms"})
            await asyncio.sleep(0.05)
            await it.settle()
            assert "within 0.02 s" in str(it.refused["a"])

    async def test_a_model_that_no_ready_pod_serves_does_not_wait(self) -> None:
        async with world(no_endpoint_timeout=30.0) as it:
            entry = QueueEntry(InferenceRequest("r", "/", "other"), it.control.queue.band(0), 0.0, lambda refusal: None)
            for pod in it.pods:
                update(pod, models=frozenset({"m"}))
            assert it.control.capacity.in_all(entry)
            it.pods = []
            assert not it.control.capacity.in_all(entry)

    async def test_no_running_request_is_evicted_for_them(self) -> None:
        async with world(no_endpoint_timeout=30.0, evict_sheddable=True) as it:
            await it.come("batch", priority=-1)
            pods, it.pods = it.pods, []
            await it.come("chat", priority=1)
            assert (it.control.queue.length, it.refused) == (1, {})
            it.pods = pods
            it.control.admit_waiting()
            await it.settle()
            assert it.order == ["batch", "chat"]


async def test_a_client_that_leaves_leaves_the_queue_at_once() -> None:
    async with world(max_concurrent=1, max_queued=1) as it:
        await it.come("a", "b")
        await it.cancel("b")
        assert it.control.queue.length == 0
        await it.come("c")
        await it.leave("a")
        assert it.names == "ac"


async def test_a_client_that_leaves_as_its_request_proceeds_passes_its_place_on() -> None:
    async with world(max_concurrent=1) as it:
        await it.come("a", "b", "c")
        it._doors["a"].set()
        await asyncio.sleep(0)
        it._tasks["b"].cancel()
        await it.settle()
        assert it.names in ("ac", "abc")
        assert it.order[-1] == "c"


async def test_retry_after_follows_the_rate_of_endings() -> None:
    async with world(max_concurrent=1, max_queued=3) as it:
        for number in range(20):
            await it.come(f"warm{number}")
            it.clock.advance(2.0)
            await it.leave(f"warm{number}")
        await it.come("a", "b", "c", "d", "e")
        assert 5 <= it.refused["e"].retry_after <= 12, "four go first, two seconds each"


async def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once() -> None:
    async with world(max_concurrent=1) as it:
        for number in range(20):
            await it.come(f"warm{number}")
            it.clock.advance(2.0)
            await it.leave(f"warm{number}")
        await it.come("a")
        await it.come("late", deadline=it.clock.now() + 0.5)
        assert it.refused["late"].reason is Reason.DEADLINE
        await it.come("intime", deadline=it.clock.now() + 60.0)
        assert "intime" not in it.refused


async def test_sheddable_requests_are_evicted_newest_first_and_one_at_a_time() -> None:
    async with world(max_concurrent=3, evict_sheddable=True, bands=(BandSettings(0), BandSettings(-1))) as it:
        await it.come("s", "t", priority=-1)
        await it.come("n")
        await it.come("o")
        assert list(it.refused) == ["t"]
        assert it.refused["t"].reason is Reason.EVICTED_PRIORITY
        assert it.names == "stno"
        await it.come("p", "q")
        assert list(it.refused) == ["t", "s"]
        assert it.names == "stnop"
        await it.come("u", priority=-1)
        assert it.control.queue.length == 2, "no request is evicted for a sheddable one"


async def test_no_request_is_evicted_unless_configured() -> None:
    async with world(max_concurrent=1, bands=(BandSettings(0), BandSettings(-1))) as it:
        await it.come("s", priority=-1)
        await it.come("n")
        assert it.refused == {}


async def test_a_full_queue_evicts_for_a_smaller_tenant_and_a_higher_priority() -> None:
    async with world(max_concurrent=1, max_queued=4) as it:
        await it.come("x", "a1", "a2", "a3", "a4", tenant="a")
        await it.come("b", tenant="b")
        assert it.refused["a4"].reason is Reason.EVICTED_QUEUE_PRESSURE
        await it.come("a5", tenant="a")
        assert it.refused["a5"].reason is Reason.SATURATED
        assert it.refused["a5"].message == "The queue is full: flowControl.maxQueued is reached."
        await it.come("u", priority=1)
        assert it.refused["a3"].reason is Reason.EVICTED_QUEUE_PRESSURE
        assert it.control.queue.length == 4
        assert it.watcher.not_served == [
            ("0", "evicted-queue-pressure"),
            ("0", "rejected-saturated"),
            ("0", "evicted-queue-pressure"),
        ]


async def test_a_body_too_large_for_the_queue_evicts_none() -> None:
    async with world(max_concurrent=1, max_queued_bytes=8) as it:
        await it.come("a", "b", "c")
        await it.come("large", body=b"x" * 100, priority=5)
        assert list(it.refused) == ["large"]
        assert it.refused["large"].message.endswith("too large for the queue: flowControl.maxQueuedBytes.")


async def test_a_body_too_large_for_its_band_evicts_none() -> None:
    async with world(max_concurrent=1, bands=(BandSettings(0, max_queued_bytes=Size(40)),)) as it:
        await it.come("x", "a1", "a2", "a3", tenant="a")
        await it.come("large", body=b"x" * 41, tenant="b")
        assert list(it.refused) == ["large"]
        assert it.refused["large"].reason is Reason.SATURATED
        assert it.refused["large"].message.endswith("too large for the queue: maxQueuedBytes of the band `0`.")


async def test_a_request_queued_until_its_deadline_is_refused_for_it() -> None:
    async with world(max_concurrent=1) as it:
        await it.come("a")
        await it.come("b", deadline=it.clock.now() + 0.02)
        await asyncio.sleep(0.05)
        await it.settle()
        assert it.refused["b"].reason is Reason.DEADLINE
        assert it.refused["b"].message == "No pod had capacity before the deadline of the request."
    async with world(max_concurrent=1, ordering="slo-deadline") as it:
        await it.come("a")
        await it.come("b", received_at=it.clock.now(), headers={"x-slo-ttft-ms": "20"})
        await asyncio.sleep(0.05)
        await it.settle()
        assert it.refused["b"].reason is Reason.DEADLINE
        assert it.refused["b"].message == "No pod had capacity before the latency objective of the request."


async def test_requests_behind_a_large_prompt_proceed_when_it_gives_up() -> None:
    async with world(max_tokens=100) as it:
        await it.come("a", tokens=60)
        await it.come("large", tokens=80)
        await it.come("small", tokens=10)
        assert it.names == "a", "small ones do not overtake"
        await it.cancel("large")
        assert it.order == ["a", "small"]


async def test_a_full_model_of_a_higher_band_does_not_block_others_of_a_lower_band() -> None:
    pods = [Endpoint("a", state=EndpointState.READY, models=frozenset("m"))]
    pods.append(Endpoint("b", state=EndpointState.READY, models=frozenset("n")))
    async with world(pods, max_concurrent_per_pod=1) as it:
        await it.come("a", "b", model="m", priority=5)
        await it.come("c", model="n")
        assert it.names == "ac"
        await it.come("d", model="n")
        await it.leave("c")
        assert it.names == "acd"


async def test_a_request_whose_pod_failed_needs_capacity_again() -> None:
    async with world(max_concurrent_per_pod=1) as it:
        await it.come("a")
        (ticket,) = it.control._inside
        taken, free = sorted(it.pods, key=lambda pod: -pod.load.requests)
        taken.charge(-1, -1)
        assert it.control.narrow(ticket.request, [taken, free]) == [taken, free]
        await it.come("b")
        assert it.names == "ab"
        await it.come("c")
        assert it.names == "ab", "one of the two places is for who looks for another pod"
        taken.charge(1, 1)
        it.control.attempt_started(_sent(ticket.request, taken))


async def test_a_repeated_prefill_needs_no_further_capacity() -> None:
    async with world(max_concurrent_per_pod=1) as it:
        await it.come("a")
        (ticket,) = it.control._inside
        it.control.narrow(ticket.request, it.pods)
        prefill = _sent(ticket.request, it.pods[1])
        prefill.stage, prefill.for_client = Stage.PREFILL, False
        it.control.attempt_started(prefill)
        assert not it.control._unsent


async def test_a_request_whose_prompt_another_pod_computes_keeps_its_cost() -> None:
    async with world(max_concurrent_per_pod=1) as it:
        await it.come("a", tokens=50)
        (ticket,) = it.control._inside
        decode = _sent(ticket.request, it.pods[0])
        decode.stage, decode.charge = Stage.DECODE, (0, 10)
        it.control.attempt_started(decode)
        assert ticket.entry.cost == 50


def _sent(request: InferenceRequest, pod: Endpoint) -> Attempt:
    attempt = Attempt(request, Decision(pod), pod, 1, 0.0)
    attempt.charge = (1, 0)
    return attempt


async def test_only_requests_on_a_wanted_pod_are_evicted() -> None:
    pods = [Endpoint("a", state=EndpointState.READY, models=frozenset("m"))]
    pods.append(Endpoint("b", state=EndpointState.READY, models=frozenset("n")))
    async with world(pods, max_concurrent_per_pod=1, evict_sheddable=True) as it:
        await it.come("s", model="m", priority=-1)
        await it.come("t", model="n", priority=-1)
        await it.come("n", model="m")
        assert list(it.refused) == ["s"]
        assert it.names == "stn"


async def test_pods_have_time_to_report_the_effect_of_an_eviction() -> None:
    pod = Endpoint("a", state=EndpointState.READY)
    saturation = Saturation("utilization", queue_depth=5)
    async with world([pod], saturation=saturation, evict_sheddable=True) as it:
        pod.publish(replace(pod.metrics, freshness=Freshness.FRESH), 0)
        await it.come("s", "t", priority=-1)
        pod.publish(replace(pod.metrics, waiting=9), 2)
        await it.come("n")
        assert list(it.refused) == ["t"]
        it.control.admit_waiting()
        await it.settle()
        assert list(it.refused) == ["t"]
        it.clock.advance(1.5)
        it.control.admit_waiting()
        await it.settle()
        assert list(it.refused) == ["t", "s"]
        pod.publish(replace(pod.metrics, waiting=0), 0)


async def test_a_pod_that_reports_an_empty_queue_does_not_get_the_whole_queue() -> None:
    pod = Endpoint("a", state=EndpointState.READY)
    async with world([pod], saturation=Saturation("utilization", queue_depth=3)) as it:
        await it.come(*"abcdefgh")
        assert it.names == ""
        pod.publish(replace(pod.metrics, freshness=Freshness.FRESH), 0)
        it.control.admit_waiting()
        await it.settle()
        assert it.names == "abc"
        pod.publish(pod.metrics, 3)
        it.control.admit_waiting()
        await it.settle()
        assert it.names == "abcdef"


@pytest.mark.parametrize(("fairness", "places"), [("strict", 40), ("round-robin", 38)])
async def test_the_last_twentieth_of_the_queue_is_reserved(fairness: str, places: int) -> None:
    async with world(max_concurrent=1, max_queued=40, fairness=fairness) as it:
        await it.come("x")
        for number in range(30):
            await it.come(f"a{number}", f"b{number}", tenant=f"{number % 2}")
        assert it.control.queue.length == places
        assert Reason.EVICTED_QUEUE_PRESSURE not in {refusal.reason for refusal in it.refused.values()}
        await it.come("c", tenant="c")
        assert "c" not in it.refused or fairness == "strict"


async def test_changed_settings_keep_and_reorder_the_queue() -> None:
    async with world(max_concurrent=1) as it:
        await it.come("0")
        for name, left in (("a", 50.0), ("b", 30.0), ("c", 40.0)):
            await it.come(name, deadline=it.clock.now() + left)
        it.control.settings = FlowControlSettings(max_concurrent=1, ordering="edf")
        assert (it.control.queue.length, it.control.queue.bytes) == (3, 12)
        await it.leave("0", "b", "c", "a")
        assert it.names == "0bca"


async def test_a_higher_cap_lets_queued_requests_proceed_and_a_lower_one_ends_none() -> None:
    async with world(max_concurrent=3) as it:
        await it.come(*"abcde")
        it.control.settings = FlowControlSettings(max_concurrent=1)
        await it.leave("a", "b")
        assert it.names == "abc"
        it.control.settings = FlowControlSettings()
        await it.settle()
        assert it.names == "abcde"


async def test_requests_of_a_removed_band_wait_in_a_band_of_their_priority() -> None:
    async with world(max_concurrent=1, bands=(BandSettings(priority=5, name="high"), BandSettings())) as it:
        await it.come("0")
        await it.come("a")
        await it.come("b", priority=5)
        it.control.settings = FlowControlSettings(max_concurrent=1, bands=(BandSettings(name="all"),))
        assert [(band.name, band.length) for band in it.control.queue.bands] == [("5", 1), ("all", 1)]
        await it.cancel("a")
        assert it.control.queue.length == 1
        await it.leave("0", "b")
        assert it.names == "0b"


async def test_service_of_a_tenant_is_kept_across_a_change() -> None:
    async with world(max_concurrent=1) as it:
        await it.come("0", tenant="x")
        await it.come("a", "b", "c", tenant="x")
        await it.leave("0", "a")
        await it.come("p", "q", tenant="y")
        it.control.settings = FlowControlSettings(max_concurrent=1, queue_timeout=Duration(90.0))
        await it.leave("b", "p", "c", "q")
        assert it.names == "0abpcq"


async def test_requests_behind_a_large_one_proceed_when_its_client_leaves() -> None:
    async with world(max_tokens=100) as it:
        await it.come("first", tokens=60)
        await it.come("large", tokens=90)
        await it.come("small", "tiny", tokens=10)
        assert it.order == ["first"], "no request overtakes a prompt that waits for capacity on all pods"
        await it.cancel("large")
        assert it.order == ["first", "small", "tiny"]


async def test_clients_that_leave_together_cause_one_search_for_capacity() -> None:
    async with world(max_concurrent=1) as it:
        names = [f"r{number}" for number in range(300)]
        for name in names:
            await it.come(name, tenant=name)
        before = it.queries
        for name in names[1:]:
            it._tasks[name].cancel()
        await it.settle()
        assert it.control.queue.length == 0
        assert it.queries - before < 5


async def test_queued_requests_proceed_when_the_pool_is_removed() -> None:
    async with world(max_concurrent=1) as it:
        async with it.control:
            await it.come(*"abc")
            assert it.names == "a"
        await it.settle()
        assert it.names == "abc"
        assert it.watcher.has_ended
