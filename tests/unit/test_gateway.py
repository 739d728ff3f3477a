"""The life of a request, between a client and pods that follow a script: whatever happens, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision, ProfileResult, ProfileRun
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import (
    BadGateway,
    ConnectFailed,
    GatewayTimeout,
    NoEndpoints,
    UnknownModel,
    UnknownResponse,
    UpstreamTimedOut,
)
from proxy.core.listener import Listener, Listeners
from proxy.core.plugin import (
    DataProducer,
    EndpointRemoved,
    Filter,
    PostResponse,
    PreRequest,
    ProfileHandler,
    Scorer,
    plugin,
)
from proxy.core.ports import Clock, Identity, ManualClock, Random
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.fleet.bindings import Bindings
from proxy.fleet.ledger import Ledger
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.gateway import Gateway
from proxy.openai.parse import Parsed
from proxy.parsing import LONGEST_MODEL, request_of
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.pool import Pool
from proxy.reliability.breaker import Breakers
from proxy.reliability.failover import Failover, Quarantine, RetryBudget
from proxy.reliability.settings import BreakerSettings, Retries
from proxy.scheduling.build import build
from proxy.scheduling.document import read
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observer import Observer

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"long prompt " * 200)

Script = Callable[[Attempt], Awaitable[None]]


@dataclass
class FakeClientRequest:
    body: bytes = BODY
    path: str = CHAT
    method: str = "POST"
    query: str = ""
    id: str = "id-1"
    headers: Mapping[str, str] = field(default_factory=dict)
    received_at: float = 0.0
    identity: Identity | None = None
    upload: object | None = None
    refusal: str = ""
    model: str = ""


@dataclass
class ScriptedRelay:
    """Does with each attempt what its script says; the last one applies to all later ones."""

    scripts: Sequence[Script]
    attempts: list[Attempt] = field(default_factory=list)

    async def relay(self, attempt: Attempt) -> None:
        script = self.scripts[min(len(self.attempts), len(self.scripts) - 1)]
        self.attempts.append(attempt)
        await script(attempt)

    def race(self, on_start: Callable[[Attempt], None]) -> None:
        """One attempt at a time."""

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        await self.relay(attempt)
        return b"{}"

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        raise AssertionError("no prompt is computed elsewhere")


async def good(attempt: Attempt) -> None:
    attempt.status, attempt.first_byte_at, attempt.ending = 200, 1.0, Ending.COMPLETE


async def refused(attempt: Attempt) -> None:
    raise ConnectFailed("nobody listens")


async def too_late(attempt: Attempt) -> None:
    raise UpstreamTimedOut("no byte")


async def broken(attempt: Attempt) -> None:
    raise RuntimeError("a fault of ours")


async def endless(attempt: Attempt) -> None:
    await asyncio.Event().wait()


class Explodes(RuntimeError):
    pass


def explode(*_: object) -> Any:
    raise Explodes("boom")


@plugin("bad-hooks")
@dataclass
class BadHooks(PreRequest, PostResponse, EndpointRemoved):
    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        explode()

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        explode()

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        explode()


@plugin("bad-producer")
@dataclass
class BadProducer(DataProducer):
    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        explode()


@plugin("hung-producer")
@dataclass
class HungProducer(DataProducer):
    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        await asyncio.Event().wait()


@plugin("bad-scorer")
@dataclass
class BadScorer(Scorer):
    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        explode()
        return []


@plugin("bad-filter")
@dataclass
class BadFilter(Filter):
    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        explode()
        return endpoints


@plugin("empty-filter")
@dataclass
class EmptyFilter(Filter):
    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return []


@plugin("bad-handler")
@dataclass
class BadHandler(ProfileHandler):
    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]:
        yield "default"
        explode()
        return Decision(Endpoint("never"))


BAD = (BadHooks, BadProducer, HungProducer, BadScorer, BadFilter, BadHandler, EmptyFilter)

PLUGINS = ("prefix-cache-scorer", "queue-scorer", "no-hit-lru-scorer", "session-affinity-scorer", "round-robin-picker")


class World:
    """A gateway over pods `a`, `b` and `c`, all of them ready."""

    def __init__(self, *extra: str, names: str = "abc", attempts: int = 3, first: Listener | None = None) -> None:
        self.clock = clock = ManualClock(now=1000.0)
        self.scheduling = build(
            read({"plugins": [{"type": name} for name in (*PLUGINS, *extra)]}),
            Registry([*Registry.discover(), *BAD]),
            {Clock: clock, Random: random.Random(1)},
        )
        self.fleet = Fleet(clock, on_removed=self._removed, grace=0.0)
        for name in names:
            endpoint = self.fleet.add(PodSettings(f"http://{name}:1", name, models=("m",)))
            self.fleet.reached(endpoint)
        self.ledger = Ledger(clock)
        self.bindings = Bindings(clock)
        catalogue = Catalogue("test")
        observer = Observer(catalogue, EndpointSeries(catalogue, self.fleet, clock), clock)
        budget = RetryBudget(20, clock, lambda: self.ledger.entered)
        poison = Quarantine(clock, self._alive, Tasks())
        failover = Failover(Retries(attempts), clock, random.Random(2), budget, poison, self._sleep)
        self.later: list[Callable[[], None]] = []
        breakers = Breakers(BreakerSettings(), clock, self.fleet, lambda seconds, call: self.later.append(call))
        listeners = Listeners(
            [first or Listener(), self.ledger, breakers, failover.quarantine, self.bindings, observer]
        )
        self.gateway = Gateway(
            self.fleet,
            [Pool(self.fleet, self.scheduling, common=listeners)],
            self.bindings,
            clock,
            failover,
        )

    async def serve(self, *scripts: Script, client_request: FakeClientRequest | None = None) -> list[Attempt]:
        relay = ScriptedRelay(scripts)
        await self.gateway.serve(client_request or FakeClientRequest(), relay)
        return relay.attempts

    async def removed_meanwhile(self, attempt: Attempt) -> None:
        """A script: a stored response, of a pod that is removed while it responds."""
        self.fleet.remove(attempt.endpoint.name)
        attempt.response_id = "resp_1"
        await good(attempt)

    def assert_that_nothing_is_left(self) -> None:
        loads = [endpoint.load for endpoint in self.fleet.endpoints]
        assert self.ledger.in_flight == 0
        assert all((load.requests, load.tokens) == (0, 0) for load in loads)
        index = next(one for one in self.scheduling.instances.values() if isinstance(one, ApproxPrefixCacheProducer))
        assert all(not pod.pinned for pod in index.index._pods.values())

    def pairs(self) -> int:
        indexes = [one for one in self.scheduling.instances.values() if isinstance(one, ApproxPrefixCacheProducer)]
        return sum(one.index.pairs for one in indexes)

    def remembering(self) -> Iterator[Endpoint]:
        """The endpoints known to a plugin."""
        for one in self.scheduling.instances.values():
            if isinstance(one, ApproxPrefixCacheProducer):
                yield from (memory.endpoint for memory in one.index.memories)
            for held in vars(one).values() if hasattr(one, "__dict__") else ():
                yield from (key for key in held if isinstance(key, Endpoint)) if isinstance(held, dict) else ()

    async def _alive(self, endpoint: Endpoint) -> bool:
        return True

    async def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def _removed(self, endpoint: Endpoint) -> None:
        self.scheduling.forget(endpoint)
        self.bindings.forget(endpoint)


async def test_a_successful_response_leaves_its_blocks_and_nothing_else() -> None:
    world = World()
    (attempt,) = await world.serve(good)
    assert attempt.succeeded
    assert world.pairs() > 0
    world.assert_that_nothing_is_left()


class Faulty(Listener):
    """Fails at every decision, and where attempts start and end."""

    def decided(self, *_: object) -> None:
        explode()

    def not_scheduled(self, *_: object) -> None:
        explode()

    def attempt_started(self, attempt: Attempt) -> None:
        explode()

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        explode()


async def test_failing_listeners_cost_no_request_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(first=Faulty())
    for _ in range(2):
        (attempt,) = await world.serve(good)
        assert attempt.succeeded
    failures = [record.getMessage() for record in caplog.records if record.exc_info]
    assert [failure.split(" failed ")[0] for failure in failures] == [
        "listener Faulty.decided",
        "listener Faulty.attempt_started",
        "listener Faulty.attempt_ended",
    ]
    world.assert_that_nothing_is_left()


async def test_a_failing_listener_at_a_refusal_does_not_change_its_error(caplog: pytest.LogCaptureFixture) -> None:
    world = World("empty-filter", first=Faulty())
    relay = ScriptedRelay([good])
    with pytest.raises(NoEndpoints):
        await world.gateway.serve(FakeClientRequest(), relay)
    assert relay.attempts == []
    (failure,) = [record.getMessage() for record in caplog.records if record.exc_info]
    assert failure.startswith("listener Faulty.not_scheduled failed ")
    world.assert_that_nothing_is_left()


async def test_unreachable_pods_are_all_tried_before_any_is_tried_again() -> None:
    world = World(names="abcde")
    relay = ScriptedRelay([refused])
    with pytest.raises(BadGateway, match="tried 7"):
        await world.gateway.serve(FakeClientRequest(), relay)
    assert [attempt.number for attempt in relay.attempts] == list(range(7))
    assert {attempt.endpoint.name for attempt in relay.attempts[:5]} == set("abcde")
    assert world.pairs() == 0
    world.assert_that_nothing_is_left()


async def test_a_retry_skips_draining_pods_and_does_not_count_them() -> None:
    world = World()

    async def refused_while_the_others_drain(attempt: Attempt) -> None:
        world.fleet.drain(attempt.decision.fallbacks[0].name)
        await refused(attempt)

    first, second = await world.serve(refused_while_the_others_drain, good)
    assert second.endpoint is first.decision.fallbacks[1]
    assert second.number == 1


async def test_a_retry_skips_a_pod_that_was_replaced_under_its_name() -> None:
    world = World()
    replaced: list[Endpoint] = []

    async def refused_while_the_next_is_replaced(attempt: Attempt) -> None:
        replaced.append(attempt.decision.fallbacks[0])
        name = replaced[0].name
        world.fleet.add(PodSettings("http://new:1", name, models=("m",), uid="another"))
        await refused(attempt)

    first, second = await world.serve(refused_while_the_next_is_replaced, good)
    assert second.endpoint is first.decision.fallbacks[1]


@pytest.mark.parametrize("ends", [good, broken])
async def test_nothing_is_kept_of_a_pod_removed_during_an_attempt(ends: Script) -> None:
    world = World()
    relay = ScriptedRelay([])

    async def leaves(attempt: Attempt) -> None:
        world.fleet.add(PodSettings("http://new:1", attempt.endpoint.name, models=("m",), uid="another"))
        attempt.response_id = "resp_1"
        await ends(attempt)

    relay.scripts = [leaves]
    with contextlib.suppress(RuntimeError):
        await world.gateway.serve(FakeClientRequest(), relay)
    (dispatched,) = relay.attempts
    assert dispatched.endpoint.state is EndpointState.GONE
    assert world.pairs() == 0
    assert [one for one in world.remembering() if one is dispatched.endpoint] == []
    assert not dispatched.endpoint.is_watched
    world.assert_that_nothing_is_left()


async def test_a_silent_pod_that_got_the_request_is_not_followed_by_another() -> None:
    world = World()
    with pytest.raises(GatewayTimeout):
        await world.serve(too_late)
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("script", [broken, too_late])
async def test_a_failure_in_the_relay_leaves_nothing(script: Script) -> None:
    world = World()
    with pytest.raises((RuntimeError, GatewayTimeout)):
        await world.serve(script)
    assert world.pairs() == 0
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("extra", ["hung-producer", "queue-scorer"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(extra: str, turns: int) -> None:
    world = World(*([extra] if extra not in PLUGINS else []))
    task = asyncio.ensure_future(world.serve(endless))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.pairs() == 0
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("leaves", ["a", "b"])
async def test_a_pod_removed_while_producers_wait_is_not_chosen(leaves: str) -> None:
    world = World("hung-producer", names="ab")
    serving = asyncio.ensure_future(world.serve(good))
    await asyncio.sleep(0)
    world.fleet.remove(leaves)
    (attempt,) = await serving
    assert attempt.endpoint.name != leaves


async def test_a_request_without_pods_after_the_producers_is_refused() -> None:
    world = World("hung-producer", names="a")
    serving = asyncio.ensure_future(world.serve(good))
    await asyncio.sleep(0)
    world.fleet.remove("a")
    with pytest.raises(NoEndpoints):
        await serving
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("extra", ["bad-hooks", "bad-producer", "bad-scorer", "hung-producer"])
async def test_a_plugin_that_fails_outside_the_decision_does_not_cost_the_request(extra: str) -> None:
    world = World(extra)
    (attempt,) = await world.serve(good)
    assert attempt.succeeded
    world.assert_that_nothing_is_left()


@pytest.mark.parametrize("extra", ["bad-filter", "bad-handler"])
async def test_a_failing_filter_or_handler_costs_no_request_and_one_log_line(
    extra: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(extra)
    for _ in range(3):
        (attempt,) = await world.serve(good)
        assert attempt.succeeded
    assert [extra in record.getMessage() for record in caplog.records] == [True]
    world.assert_that_nothing_is_left()


async def test_a_pod_removed_during_its_request_is_dropped_permanently() -> None:
    world = World()
    await world.serve(world.removed_meanwhile)
    assert len(world.fleet.endpoints) == 2
    assert world.pairs() == 0
    world.assert_that_nothing_is_left()


async def test_a_request_about_a_stored_response_goes_to_its_pod_at_once() -> None:
    world = World()

    async def stored(attempt: Attempt) -> None:
        attempt.response_id = "resp_1"
        await good(attempt)

    (first,) = await world.serve(stored)
    for _ in world.fleet.endpoints:
        (dispatched,) = await world.serve(
            good, client_request=FakeClientRequest(path="/v1/responses/resp_1", method="GET", body=b"")
        )
        assert dispatched.endpoint is first.endpoint
        assert not dispatched.request.state  # No producer was asked.


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/responses/resp_1", b""),
        ("POST", "/v1/responses", b'{"model":"m","input":"Go on","previous_response_id":"resp_1"}'),
    ],
)
async def test_a_response_that_another_process_has_just_relayed_is_found(method: str, path: str, body: bytes) -> None:
    world = World()
    world.bindings.table.on_bind = lambda key, endpoint: None  # published to others
    holder = world.fleet.endpoints[-1]
    asyncio.get_running_loop().call_later(0.02, world.bindings.bind, "resp_1", holder)
    (attempt,) = await world.serve(good, client_request=FakeClientRequest(path=path, method=method, body=body))
    assert attempt.endpoint is holder
    world.assert_that_nothing_is_left()


async def test_a_response_of_a_removed_pod_is_not_requested() -> None:
    world = World()
    await world.serve(world.removed_meanwhile)
    with pytest.raises(UnknownResponse):
        await world.serve(good, client_request=FakeClientRequest(path="/v1/responses/resp_1", method="GET", body=b""))
    assert len(world.bindings.table) == 0


def test_a_name_that_is_too_long_for_a_model_is_unknown() -> None:
    name = "x" * (LONGEST_MODEL + 1)
    with pytest.raises(UnknownModel):
        request_of(FakeClientRequest(), Parsed(name, BODY), name, 1.0)
    assert request_of(FakeClientRequest(), Parsed(name[1:], BODY), name[1:], 1.0).model == name[1:]
