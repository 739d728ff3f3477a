"""Prompts that one pod computes and another decodes, between a client and pods that follow a script."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.decision import SPLIT, Decision
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import (
    AllFailed,
    BadRequest,
    ConnectFailed,
    Declined,
    Disconnected,
    GatewayTimeout,
    NoEndpoints,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import InstanceName, ManualClock
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import PluginState
from proxy.core.tasks import Tasks
from proxy.disagg.connectors.nixl import Nixl
from proxy.disagg.settings import DisaggregationSettings
from proxy.disagg.transfer import FAILED, REFUSED, SplitRequests
from proxy.fleet.ledger import Ledger
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.reliability.failover import Failover, Quarantine, RetryBudget
from proxy.reliability.settings import Retries
from proxy.telemetry import metrics
from tests.helpers.waiting import PATIENCE

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}],"max_tokens":50}'
KEPT = {"do_remote_prefill": True, "remote_engine_id": "e-1", "remote_block_ids": [1, 2]}
PROMPT_TOKENS = 400

Script = Callable[[Attempt], Awaitable[Any]]


async def keeps(attempt: Attempt) -> bytes:
    """What a prefill pod does."""
    attempt.status, attempt.first_byte_at, attempt.last_byte_at, attempt.ending = 200, 1.0, 1.0, Ending.COMPLETE
    attempt.usage = Usage(PROMPT_TOKENS, 1, 64)
    return orjson.dumps({"choices": [{}], "kv_transfer_params": KEPT})


async def keeps_nothing(attempt: Attempt) -> bytes:
    await keeps(attempt)
    return b'{"choices":[{}],"kv_transfer_params":null}'


async def keeps_what_is_nested_too_deeply(attempt: Attempt) -> bytes:
    await keeps(attempt)
    return b'{"kv_transfer_params":{"remote_engine_id":"e","x":%b%b}}' % (b"[" * 1010, b"]" * 1010)


async def is_nested_too_deeply(attempt: Attempt) -> bytes:
    await keeps(attempt)
    return b"[" * 100_000


ERROR = b'{"error":{"message":"top_k must be at least -1"}}'


def finds_fault(status: int) -> Script:
    async def script(attempt: Attempt) -> bytes:
        attempt.status, attempt.ending = status, Ending.COMPLETE
        return ERROR

    return script


async def responds(attempt: Attempt) -> None:
    attempt.status, attempt.first_byte_at, attempt.ending = 200, 2.0, Ending.COMPLETE
    for listener in attempt.listeners.first_byte:
        listener(attempt)


async def is_gone(attempt: Attempt) -> Any:
    raise ConnectFailed("connection refused")


async def breaks_off(attempt: Attempt) -> Any:
    raise Disconnected("connection lost", silent=True)


async def is_late(attempt: Attempt) -> Any:
    attempt.ending = Ending.TIMED_OUT
    raise UpstreamTimedOut("no response")


async def declines(attempt: Attempt) -> Any:
    raise Declined(503)


async def hangs(attempt: Attempt) -> Any:
    """Receive the request and never respond."""
    attempt.sent_at = 3.0
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        attempt.ending = Ending.CLIENT_GONE
        raise


class World:
    """Prefill pods `p0` and `p1` and decode pods `d0` and `d1`; `scripts` has the behaviour of each by its name."""

    def __init__(self, connector: Any = "nixl", body: bytes = BODY, attempts: int = 3) -> None:
        self.clock = ManualClock(now=100.0)
        self.pods = {name: Endpoint(name, f"http://{name}:80", state=EndpointState.READY) for name in PODS}
        self.scripts: dict[str, Script] = {name: keeps if name[0] == "p" else responds for name in PODS}
        self.prefill: tuple[Endpoint, ...] = (self.pods["p0"], self.pods["p1"])
        self.encode: tuple[Endpoint, ...] = ()
        self.why = SPLIT
        self.attempts: list[Attempt] = []
        self.bodies: list[dict[str, Any]] = []
        self.on_pods: list[dict[str, int]] = []
        self.reported: list[int | None] = []
        self.passed_on: list[tuple[str, int | None, bytes]] = []
        self.counts: Counter[str] = Counter()
        self.producer: PredictedLatencyProducer | None = None
        self.ledger = Ledger(self.clock)
        budget = RetryBudget(20, self.clock, lambda: self.ledger.entered)
        self.tasks = Tasks()
        poison = Quarantine(self.clock, self._alive, Tasks())
        self.failover = Failover(Retries(attempts), self.clock, random.Random(1), budget, poison, self._sleep)
        self.split_requests = SplitRequests(
            DisaggregationSettings(connector),
            self.failover,
            self.ledger,
            self.clock,
            random.Random(2),
            self.tasks,
            lambda result: Counted(self.counts, result),
        )
        prompt = Prompt((b"x" * 4 * PROMPT_TOKENS,))
        self.request = InferenceRequest("id-1", CHAT, "m", prompt, body, stream=True, max_tokens=50)

    async def serve(self) -> None:
        """As the gateway does."""
        pods = self.pods
        decision = Decision(pods["d0"], (pods["d1"],), "decode", self.prefill, self.encode, self.why)
        decision, hand_off = self.split_requests.of(self.request, decision, self, self._attempt)
        attempt = Attempt(self.request, decision, decision.target, 0, self.clock.now())
        while True:
            try:
                if hand_off is None:
                    with self._attempt(attempt):
                        await self.relay(attempt)
                else:
                    await hand_off.run(attempt)
            except UpstreamFailed as error:
                attempt = await self.failover.next_attempt(attempt, error)
            else:
                return

    async def relay(self, attempt: Attempt) -> None:
        self._note(attempt)
        await self.scripts[attempt.endpoint.name](attempt)

    def race(self, on_start: Callable[[Attempt], None]) -> None:
        """One attempt at a time."""

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        self._note(attempt)
        raw: bytes = await self.scripts[attempt.endpoint.name](attempt)
        return raw

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        self.passed_on.append((attempt.endpoint.name, attempt.status, body))

    @property
    def way(self) -> list[str]:
        return [attempt.endpoint.name for attempt in self.attempts]

    def assert_that_nothing_is_left(self) -> None:
        assert self.ledger.in_flight == 0
        assert all((pod.load.requests, pod.load.tokens) == (0, 0) for pod in self.pods.values())
        assert all(attempt.ending is not None for attempt in self.attempts)

    def _note(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.bodies.append(orjson.loads(attempt.request.body))
        self.on_pods.append({name: pod.load.tokens for name, pod in self.pods.items() if pod.load.requests})
        self.reported.append(attempt.cached_to_report)

    @contextmanager
    def _attempt(self, attempt: Attempt) -> Generator[None, None, None]:
        self.ledger.attempt_started(attempt)
        if self.producer is not None:
            self.producer.pre_request(attempt, attempt.endpoint)
        try:
            yield
        except BaseException:
            attempt.ending = attempt.ending or Ending.UPSTREAM_FAILED
            raise
        finally:
            assert attempt.ending is not None
            self.ledger.attempt_ended(attempt)
            if self.producer is not None:
                self.producer.post_response(attempt, attempt.endpoint)

    async def _alive(self, endpoint: Endpoint) -> bool:
        return True

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


PODS = ("p0", "p1", "d0", "d1")


@dataclass
class Counted(metrics.Counter):
    counts: Counter[str]
    name: str

    def add(self, amount: float = 1.0) -> None:
        self.counts[self.name] += int(amount)


async def test_the_prompt_goes_to_one_pod_and_its_transfer_parameters_to_the_other() -> None:
    world = World()
    await world.serve()
    assert world.way == ["p0", "d0"]
    prefill, decode = world.bodies
    assert prefill["max_tokens"] == prefill["max_completion_tokens"] == 1
    assert prefill["stream"] is False
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert decode["max_tokens"] == 50
    assert decode["stream"] is True
    assert decode["kv_transfer_params"] == KEPT
    assert [attempt.stage for attempt in world.attempts] == [Stage.PREFILL, Stage.DECODE]
    assert [attempt.for_client for attempt in world.attempts] == [False, True]
    assert world.reported == [None, 64]
    assert world.attempts[1].response_headers == [("x-kvlane-prefill-endpoint", "p0")]
    assert world.counts == {SPLIT: 1}
    world.assert_that_nothing_is_left()


async def test_the_prefill_pod_gets_integers_of_any_length() -> None:
    world = World(body=b'{"messages":[],"stream":true,"tools":[{"maximum":%d}]}' % 2**256)
    await world.serve()
    assert [body["tools"] for body in world.bodies] == [[{"maximum": 2**256}]] * 2


async def test_each_pod_is_charged_until_the_decode_pod_has_responded() -> None:
    world = World()
    await world.serve()
    assert world.on_pods == [{"p0": PROMPT_TOKENS, "d0": 0}, {"p0": 0, "d0": 0}]
    left = [attempt.endpoint.load.requests for attempt in world.attempts]
    assert left == [0, 0]


async def test_the_prefill_pod_is_free_when_the_response_has_started() -> None:
    world = World()
    seen: list[int] = []

    async def begins(attempt: Attempt) -> None:
        seen.append(world.pods["p0"].load.requests)
        (listener,) = attempt.listeners.first_byte
        listener(attempt)
        seen.append(world.pods["p0"].load.requests)
        await responds(attempt)

    world.scripts["d0"] = begins
    await world.serve()
    assert seen == [1, 0]
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("fault", [is_gone, breaks_off, is_late, declines])
async def test_a_failed_prefill_pod_is_replaced_by_another(fault: Script) -> None:
    world = World()
    world.scripts["p0"] = fault
    await world.serve()
    assert world.way == ["p0", "p1", "d0"]
    assert world.attempts[1].number == 1
    assert world.counts == {SPLIT: 1}
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("fault", [is_gone, breaks_off, is_late, declines])
async def test_the_decode_pod_does_all_if_no_prefill_pod_can(fault: Script) -> None:
    world = World(attempts=2)
    world.scripts |= dict.fromkeys(("p0", "p1"), fault)
    await world.serve()
    assert world.way[-1] == "d0"
    assert set(world.way[:-1]) == {"p0", "p1"}
    assert "kv_transfer_params" not in world.bodies[-1]
    assert world.on_pods[-1] == {"d0": PROMPT_TOKENS}
    assert world.attempts[-1].stage is Stage.WHOLE
    assert world.reported[-1] is None
    assert world.counts == {FAILED: 1}
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("fault", [breaks_off, is_late, declines])
async def test_one_other_prefill_pod_is_tried_and_none_twice(fault: Script) -> None:
    world = World(attempts=5)
    world.prefill = (*world.prefill, Endpoint("p2", state=EndpointState.READY))
    world.scripts |= dict.fromkeys(("p0", "p1"), fault)
    await world.serve()
    assert world.way == ["p0", "p1", "d0"]
    world.assert_that_nothing_is_left()

    alone = World(attempts=5)
    alone.prefill, alone.scripts["p0"] = alone.prefill[:1], fault
    await alone.serve()
    assert alone.way == ["p0", "d0"]


@pytest.mark.parametrize("first", [is_gone, breaks_off])
async def test_an_unreachable_prefill_pod_does_not_count_as_a_try(first: Script) -> None:
    world = World()
    p2 = world.pods["p2"] = Endpoint("p2", state=EndpointState.READY)
    world.prefill = (*world.prefill, p2)
    world.scripts |= {"p0": first, "p1": is_gone, "p2": keeps}
    await world.serve()
    assert world.way == ["p0", "p1", "p2", "d0"]
    assert world.counts == {SPLIT: 1}


async def test_if_no_pod_can_do_all_prefill_has_the_retries_of_any_request() -> None:
    world = World("p2p-nccl", attempts=4)
    world.scripts |= dict.fromkeys(("p0", "p1"), breaks_off)
    with pytest.raises(AllFailed):
        await world.serve()
    assert len(world.way) > 2
    assert set(world.way) == {"p0", "p1"}
    world.assert_that_nothing_is_left()


async def test_later_requests_wait_for_a_prompt_that_the_decode_pod_computes() -> None:
    world = World()
    d0 = world.pods["d0"]
    producer = world.producer = PredictedLatencyProducer(InstanceName("latency"), world.clock, PluginState())
    producer.models(list(world.pods.values()), world.clock.now())
    in_line: list[float] = []

    async def looks(attempt: Attempt) -> bytes | None:
        (pod,) = producer.models([d0], world.clock.now())
        in_line.append(sum(dispatched.tokens for dispatched in pod.queue))
        return await (responds if attempt.endpoint is d0 else breaks_off)(attempt)

    world.scripts = dict.fromkeys(PODS, looks)
    await world.serve()
    (pod,) = producer.models([d0], world.clock.now())
    assert in_line == [0, 0, PROMPT_TOKENS]
    assert not pod.queue


@pytest.mark.parametrize("connector", ["nixl", "p2p-nccl", "mooncake", "sglang"])
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_client_gets_the_prefill_pods_rejection(connector: str, status: int) -> None:
    world = World(connector)
    world.scripts |= {"p0": finds_fault(status), "d0": evicted_while_it_waits}
    await world.serve()
    assert world.passed_on == [("p0", status, ERROR)]
    assert set(world.way) <= {"p0", "d0"}
    assert ("d0" in world.way) is (connector in ("mooncake", "sglang")), "only what needs both at once is sent to both"
    assert world.counts == {REFUSED: 1}
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize(
    "fault",
    [keeps_nothing, keeps_what_is_nested_too_deeply, is_nested_too_deeply, finds_fault(401), finds_fault(404)],
)
async def test_a_refused_or_empty_prefill_is_left_to_the_decode_pod(fault: Script) -> None:
    world = World()
    world.scripts["p0"] = fault
    await world.serve()
    assert world.way == ["p0", "d0"]
    assert world.attempts[-1].stage is Stage.WHOLE
    world.assert_that_nothing_is_left()


async def test_a_request_nested_too_deeply_is_refused() -> None:
    world = World(body=BODY[:-1] + b',"metadata":%b%b}' % (b"[" * 1010, b"]" * 1010))
    with pytest.raises(BadRequest, match="nested too deeply"):
        await world.serve()
    world.assert_that_nothing_is_left()


async def test_a_prefill_pod_without_a_transfer_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Like a pod that was started without its connector: every prompt would silently be computed twice."""
    world = World()
    world.scripts["p0"] = keeps_nothing
    await world.serve()
    [logged] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert logged.getMessage() == (
        "request id-1: no usable KV transfer from pod p0 (status 200); the decode pod computes the prompt"
    )


class RaisingConnector(Nixl):
    name = "raising"

    def hand_over(self, body: dict[str, Any]) -> dict[str, Any] | None:
        raise KeyError("block")


async def test_a_connector_that_raises_leaves_the_prompt_to_the_decode_pod(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.split_requests.connector = RaisingConnector()
    await world.serve()
    assert world.way == ["p0", "d0"]
    assert world.attempts[-1].stage is Stage.WHOLE
    world.assert_that_nothing_is_left()
    assert "connector raising: failed to read the response of pod p0" in caplog.text


HUGE = b"9" * 400


@pytest.mark.parametrize(
    "params",
    [
        b'"e"',
        b"5",
        b"[]",
        b'[{"remote_engine_id":"e"}]',
        b"true",
        b'{"remote_engine_id":5}',
        b'{"remote_engine_id":["e"]}',
        b'{"remote_engine_id":{"e":1}}',
        b'{"remote_engine_id":"e","remote_block_ids":"1,2"}',
        b'{"remote_engine_id":"e","remote_block_ids":{"0":1}}',
        b'{"remote_engine_id":"e","remote_block_ids":[[[1]]]}',
        b'{"remote_engine_id":"e","remote_block_ids":["1"]}',
        b'{"remote_engine_id":"e","remote_block_ids":[%b]}' % HUGE,
        b'{"remote_engine_id":"e","remote_block_ids":[true]}',
        b'{"remote_engine_id":"e","remote_block_ids":%b%b}' % (b"[" * 500, b"]" * 500),
        b'{"remote_engine_id":"e","remote_port":"5600"}',
        b'{"remote_engine_id":"e","remote_port":%b}' % HUGE,
        b'{"remote_engine_id":"e","remote_port":1e400}',
        b'{"remote_engine_id":"e","remote_port":-1}',
        b'{"remote_engine_id":"e","remote_host":["10.0.0.1"]}',
        b'{"remote_engine_id":"e","remote_request_id":5}',
        b'{"remote_engine_id":"e","tp_size":"1"}',
        b'{"remote_engine_id":"e","x":%b%b}' % (b"[" * 253, b"]" * 253),
        b'{"remote_engine_id":"\\ud800","remote_port":"x"}',
    ],
)
async def test_transfer_parameters_of_another_type_leave_the_prompt_to_the_decode_pod(params: bytes) -> None:
    async def keeps_what_no_engine_takes(attempt: Attempt) -> bytes:
        await keeps(attempt)
        return b'{"kv_transfer_params":%b}' % params

    world = World()
    world.scripts["p0"] = keeps_what_no_engine_takes
    await world.serve()
    assert world.way == ["p0", "d0"]
    assert world.attempts[-1].stage is Stage.WHOLE
    assert "kv_transfer_params" not in world.bodies[-1]
    world.assert_that_nothing_is_left()


async def test_an_unused_transfer_goes_to_the_next_decode_pod() -> None:
    world = World()
    world.scripts["d0"] = is_gone
    await world.serve()
    assert world.way == ["p0", "d0", "d1"]
    assert world.bodies[-1]["kv_transfer_params"] == KEPT
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("fault", [breaks_off, declines])
async def test_a_decode_pod_that_fails_with_the_transfer_is_replaced_with_a_new_prefill(
    fault: Script,
) -> None:
    world = World()
    world.scripts["d0"] = fault
    await world.serve()
    assert world.way == ["p0", "d0", "p1", "d1"]
    world.assert_that_nothing_is_left()


async def test_after_all_prefill_pods_the_next_decode_pod_does_all() -> None:
    world = World()
    world.scripts |= {"p0": is_gone, "d0": breaks_off}
    await world.serve()
    assert world.way == ["p0", "p1", "d0", "d1"]
    assert world.attempts[-1].stage is Stage.WHOLE
    world.assert_that_nothing_is_left()


async def test_a_response_that_starts_as_its_prefill_breaks_off_continues() -> None:
    world = World("mooncake")

    async def begins_a_moment_later(attempt: Attempt) -> None:
        while "p0" not in world.way or world.ledger.in_flight > 1:
            await asyncio.sleep(0)
        await responds(attempt)

    world.scripts |= {"p0": breaks_off, "d0": begins_a_moment_later}
    await world.serve()
    assert sorted(world.way) == ["d0", "p0"]
    assert world.counts == {SPLIT: 1}
    world.assert_that_nothing_is_left()


async def test_without_a_decode_pod_the_client_gets_an_error() -> None:
    world = World()
    world.scripts |= dict.fromkeys(("d0", "d1"), breaks_off)
    with pytest.raises(AllFailed):
        await world.serve()
    world.assert_that_nothing_is_left()


async def test_a_deadline_during_the_prefill_ends_the_request() -> None:
    world = World()

    async def takes_too_long(attempt: Attempt) -> Any:
        world.clock.advance(100.0)
        await is_late(attempt)

    world.request = InferenceRequest("id-1", CHAT, "m", body=BODY, stream=True, deadline=150.0)
    world.scripts["p0"] = takes_too_long
    with pytest.raises(GatewayTimeout):
        await world.serve()
    assert world.way == ["p0"]
    world.assert_that_nothing_is_left()


async def _leaves(world: World, at: str) -> None:
    """A client, as soon as the pod `at` has its request."""
    serving = asyncio.create_task(world.serve())
    while world.way[-1:] != [at]:
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving


async def test_a_client_that_leaves_during_the_prefill_is_not_decoded() -> None:
    world = World()
    world.scripts["p0"] = hangs
    async with world.tasks:
        await _leaves(world, "p0")
        await asyncio.sleep(0)
    assert world.way == ["p0"]
    world.assert_that_nothing_is_left()


async def test_an_unused_transfer_of_a_client_that_left_is_fetched_for_one_token() -> None:
    world = World()

    async def hangs_once(attempt: Attempt) -> Any:
        world.scripts["d0"] = keeps
        await asyncio.Event().wait()

    world.scripts["d0"] = hangs_once
    async with world.tasks:
        await _leaves(world, "d0")
        await asyncio.sleep(0.01)
    assert world.way == ["p0", "d0", "d0"]
    assert world.bodies[-1]["max_tokens"] == 1
    assert world.bodies[-1]["stream"] is False
    assert world.bodies[-1]["kv_transfer_params"] == KEPT
    world.assert_that_nothing_is_left()


async def test_a_used_transfer_is_not_fetched_again() -> None:
    world = World()
    world.scripts["d0"] = hangs
    async with world.tasks:
        await _leaves(world, "d0")
        await asyncio.sleep(0.01)
    assert world.way == ["p0", "d0"]
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize(
    "body", [b"[]", b"\x1f\x8b", b'{"messages":[],"n":2}', b'{"messages":[],"tool_choice":"required"}']
)
async def test_requests_that_cannot_be_split_go_to_one_pod(body: bytes) -> None:
    world = World(body=body)
    world._note = world.attempts.append  # type: ignore[method-assign,assignment]  # the body may be no JSON
    await world.serve()
    assert world.way == ["d0"]
    assert world.attempts[0].stage is Stage.WHOLE
    assert list(world.counts) != [SPLIT]
    world.assert_that_nothing_is_left()


async def test_pods_with_addresses_in_the_id_get_the_same_id() -> None:
    world = World("p2p-nccl")
    await world.serve()
    assert world.way == ["p0", "d0"]
    ids = [dict(attempt.upstream_headers)["x-request-id"] for attempt in world.attempts]
    assert ids[0] == ids[1]
    assert ids[0].endswith("id-1")


@dataclass
class Meeting:
    """A prefill pod and a decode pod that need each other."""

    here: set[str] = field(default_factory=set)

    async def prefill(self, attempt: Attempt) -> bytes:
        await self._meet("p")
        return await keeps(attempt)

    async def decode(self, attempt: Attempt) -> None:
        await self._meet("d")
        await responds(attempt)

    async def _meet(self, who: str) -> None:
        self.here.add(who)
        async with asyncio.timeout(PATIENCE):
            while len(self.here) < 2:
                await asyncio.sleep(0)


@pytest.mark.parametrize("connector", ["sglang", "mooncake"])
async def test_pods_that_connect_to_each_other_get_their_requests_at_once(connector: str) -> None:
    world, meeting = World(connector), Meeting()
    world.scripts |= {"p0": meeting.prefill, "d0": meeting.decode}
    await world.serve()
    assert sorted(world.way) == ["d0", "p0"]
    assert [attempt.ending for attempt in world.attempts] == [Ending.COMPLETE, Ending.COMPLETE]
    assert world.counts == {SPLIT: 1}
    world.assert_that_nothing_is_left()


async def evicted_while_it_waits(attempt: Attempt) -> None:
    """What the relay does to a cancelled attempt while its client stays."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        attempt.ending = Ending.EVICTED
        raise


@pytest.mark.parametrize("fault", [is_gone, declines, finds_fault(404)])
async def test_a_decode_pod_does_not_wait_for_a_failed_prefill(fault: Script) -> None:
    world, meeting = World("sglang"), Meeting()
    world.scripts |= {"p0": fault, "d0": evicted_while_it_waits, "p1": meeting.prefill, "d1": meeting.decode}
    await world.serve()
    assert sorted(world.way[:2]) == ["d0", "p0"]
    assert sorted(world.way[2:]) == ["d1", "p1"]
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("fault", [is_gone, declines, finds_fault(404)])
async def test_a_decode_pod_that_can_prefill_waits_for_another_prefill(fault: Script) -> None:
    world, meeting, waited = World("mooncake"), Meeting(), 0

    async def waits(attempt: Attempt) -> None:
        nonlocal waited
        waited += 1
        await (evicted_while_it_waits if waited == 1 else meeting.decode)(attempt)

    world.scripts |= {"p0": fault, "d0": waits, "p1": meeting.prefill}
    await world.serve()
    assert (sorted(world.way[:2]), sorted(world.way[2:])) == (["d0", "p0"], ["d0", "p1"])
    assert world.counts == {SPLIT: 1}
    world.assert_that_nothing_is_left()


async def test_a_decode_pod_that_fails_for_lack_of_the_transfer_is_not_blamed() -> None:
    """It does all of it, when two prefill pods have failed."""
    world, failed = World("mooncake"), asyncio.Event()

    async def finds_nothing(attempt: Attempt) -> None:
        if attempt.stage is not Stage.WHOLE:
            await failed.wait()
            failed.clear()
            await asyncio.sleep(0)
            await declines(attempt)
        await responds(attempt)

    async def fails(attempt: Attempt) -> Any:
        failed.set()
        await declines(attempt)

    world.scripts |= {"p0": fails, "p1": fails, "d0": finds_nothing}
    await world.serve()
    assert (sorted(world.way[:4]), world.way[4:]) == (["d0", "d0", "p0", "p1"], ["d0"])
    of_d0 = [dispatched.ending for dispatched in world.attempts if dispatched.endpoint.name == "d0"]
    assert of_d0 == [Ending.EVICTED, Ending.EVICTED, Ending.COMPLETE]
    assert world.counts == {"prefill-failed": 1}
    world.assert_that_nothing_is_left()


async def test_a_failed_decode_pod_ends_its_prefill() -> None:
    world, meeting = World("sglang"), Meeting()

    async def breaks_off_meanwhile(attempt: Attempt) -> None:
        while "p0" not in world.way:
            await asyncio.sleep(0)
        await breaks_off(attempt)

    world.scripts |= {"p0": hangs, "d0": breaks_off_meanwhile, "p1": meeting.prefill, "d1": meeting.decode}
    await world.serve()
    assert sorted(world.way[:2]) == ["d0", "p0"]
    assert sorted(world.way[2:]) == ["d1", "p1"]
    world.assert_that_nothing_is_left()


async def test_a_client_that_leaves_ends_both_attempts() -> None:
    world = World("sglang")
    world.scripts |= {"p0": hangs, "d0": hangs}
    serving = asyncio.create_task(world.serve())
    while len(world.way) < 2:
        await asyncio.sleep(0)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert {attempt.ending for attempt in world.attempts} == {Ending.CLIENT_GONE}
    world.assert_that_nothing_is_left()


MEDIA = orjson.dumps(
    {
        "model": "m",
        "stream": True,
        "max_tokens": 50,
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in ("a", "b", "c")]}
        ],
    }
)


async def encodes(attempt: Attempt) -> bytes:
    await keeps(attempt)
    url = orjson.loads(attempt.request.body)["messages"][0]["content"][0]["image_url"]["url"]
    return orjson.dumps({"ec_transfer_params": {url: attempt.endpoint.name}})


def with_encoders(*names: str, body: bytes = MEDIA) -> World:
    world = World(body=body)
    for name in names:
        world.pods[name] = Endpoint(name, f"http://{name}:80", state=EndpointState.READY)
        world.scripts[name] = encodes
    world.encode = tuple(world.pods[name] for name in names)
    return world


async def test_media_are_distributed_and_their_locations_go_to_the_prefill_pod() -> None:
    world = with_encoders("e0", "e1")
    await world.serve()
    assert sorted(world.way[:3]) == ["e0", "e0", "e1"]
    assert world.way[3:] == ["p0", "d0"]
    assert {attempt.stage for attempt in world.attempts[:3]} == {Stage.ENCODE}
    assert set(world.bodies[3]["ec_transfer_params"]) == {"a", "b", "c"}
    assert "ec_transfer_params" not in world.bodies[4]
    world.assert_that_nothing_is_left()


async def test_without_a_prefill_pod_their_locations_go_to_the_decode_pod() -> None:
    world = with_encoders("e0")
    world.prefill = ()
    await world.serve()
    assert world.way == ["e0", "e0", "e0", "d0"]
    assert set(world.bodies[3]["ec_transfer_params"]) == {"a", "b", "c"}
    assert world.attempts[3].stage is Stage.WHOLE
    world.assert_that_nothing_is_left()


async def test_a_failed_encode_pod_is_replaced_and_unencoded_media_go_to_the_next_stage() -> None:
    world = with_encoders("e0", "e1")
    world.scripts["e0"] = breaks_off
    await world.serve()
    assert set(world.bodies[-2]["ec_transfer_params"]) == {"a", "b", "c"}
    world.assert_that_nothing_is_left()

    world = with_encoders("e0", "e1")
    world.scripts |= {"e0": breaks_off, "e1": declines}
    await world.serve()
    assert world.way[-2:] == ["p0", "d0"]
    assert "ec_transfer_params" not in world.bodies[-2]
    world.assert_that_nothing_is_left()


async def test_encoded_media_are_not_encoded_again_for_the_next_decode_pod() -> None:
    world = with_encoders("e0")
    world.scripts["d0"] = breaks_off
    await world.serve()
    assert world.way == ["e0", "e0", "e0", "p0", "d0", "p1", "d1"]
    assert set(world.bodies[5]["ec_transfer_params"]) == {"a", "b", "c"}
    world.assert_that_nothing_is_left()


async def test_a_client_that_leaves_during_encoding_ends_all() -> None:
    world = with_encoders("e0")
    world.scripts["e0"] = hangs
    await _leaves(world, "e0")
    assert set(world.way) == {"e0"}
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("why", ["no-prefill-pod", "decided-against"])
async def test_a_request_that_is_not_split_goes_to_one_pod_and_is_counted(why: str) -> None:
    world = World()
    world.prefill, world.why = (), why
    await world.serve()
    assert world.way == ["d0"]
    assert world.counts == {why: 1}
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("connector", ["sglang", "p2p-nccl"])
async def test_pods_that_need_a_pair_get_no_unsplit_request(connector: str) -> None:
    world = World(connector)
    world.prefill, world.why = (), "no-prefill-pod"
    with pytest.raises(NoEndpoints, match="no-prefill-pod"):
        await world.serve()
    assert world.way == []


async def test_media_are_encoded_without_a_separate_prefill() -> None:
    world = with_encoders("e0")
    world.prefill, world.why = (), "no-prefill-pod"
    await world.serve()
    assert world.way == ["e0", "e0", "e0", "d0"]
    assert world.counts == {"no-prefill-pod": 1}
    world.assert_that_nothing_is_left()
