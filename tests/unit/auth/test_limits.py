"""Limits of keys and tenants, from admission to the end of a request."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from proxy.auth import limits as limits_module
from proxy.auth.limits import RateLimiter
from proxy.auth.meter import SECONDS_PER_DAY
from proxy.auth.settings import Limits
from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import RateLimited
from proxy.core.ports import IDENTITY, Identity, ManualClock
from proxy.core.request import TIME_LIMIT, InferenceRequest, Prompt, changed
from proxy.models.resolver import with_fresh_state

POD = Endpoint("a")


class World:
    """Keys `a` and `b` of the tenant `acme`, each with the given limits; `tenant` are the limits of acme."""

    def __init__(self, tenant: Limits | None = None, **limits: Any) -> None:
        self.clock = ManualClock(now=10.0)
        self.counted: list[tuple[str, str, bool]] = []
        self.named = {"own": Limits(**limits), **({"all": tenant} if tenant else {})}
        self.limiter = RateLimiter(self.named, {"acme": "all"}, self.clock, self.limited)

    @property
    def used(self) -> float:
        """The tokens that key `a` has used today."""
        ((_, _, used),) = self.limiter.known()
        return used[4]

    def limited(self, kind: str, name: str, shadow: bool) -> None:
        self.counted.append((kind, name, shadow))

    def request(self, key: str = "a", tokens: int = 10, max_tokens: int = 10, stream: bool = False) -> InferenceRequest:
        prompt = Prompt((b"x" * 4 * tokens,))
        request = InferenceRequest("r", "/", "m", prompt, max_tokens=max_tokens, stream=stream)
        request.state.write(IDENTITY, Identity(key, "acme", limits="own"))
        return request

    def send(self, request: InferenceRequest, usage: Usage | None = None, status: int | None = 200) -> Attempt:
        attempt = self.start(request)
        attempt.sent_at, attempt.usage, attempt.status = self.clock.now(), usage, status
        return attempt

    def start(self, request: InferenceRequest) -> Attempt:
        """An attempt that is not connected to its pod yet."""
        attempt = Attempt(request, Decision(POD), POD, 0, self.clock.now())
        self.limiter.attempt_started(attempt)
        return attempt

    async def ask(self, key: str = "a", usage: Usage | None = None, status: int | None = 200, **size: Any) -> Attempt:
        request = self.request(key, **size)
        async with self.limiter.admit(request):
            return self.send(request, usage, status)


async def test_without_a_key_there_are_no_limits() -> None:
    world = World(requests_per_minute=1)
    for _ in range(3):
        async with world.limiter.admit(InferenceRequest("r", "/", "m")):
            pass


async def test_requests_per_minute_are_limited_and_the_refusal_has_retry_after() -> None:
    world = World(requests_per_minute=2)
    await world.ask()
    await world.ask()
    with pytest.raises(RateLimited, match="2 requests per minute") as refused:
        await world.ask()
    assert refused.value.retry_after == pytest.approx(30.0)
    await world.ask("b")
    world.clock.advance(30.0)
    await world.ask()
    assert world.counted == [("key", "a", False)]


async def test_tokens_are_reserved_and_the_rest_is_returned() -> None:
    world = World(tokens_per_minute=100)
    await world.ask(tokens=50, max_tokens=50, usage=Usage(40, 10))
    await world.ask(tokens=25, max_tokens=25, usage=Usage(25, 25))
    with pytest.raises(RateLimited, match="100 tokens per minute"):
        await world.ask(tokens=5, max_tokens=5)


async def test_without_usage_the_reservation_is_charged() -> None:
    world = World(tokens_per_minute=100)
    await world.ask(tokens=50, max_tokens=50)
    with pytest.raises(RateLimited):
        await world.ask(tokens=5, max_tokens=5)


@pytest.mark.parametrize("status", [None, 400, 503])
async def test_a_failed_request_costs_no_tokens(status: int | None) -> None:
    world = World(tokens_per_minute=100)
    await world.ask(tokens=50, max_tokens=50, status=status)
    await world.ask(tokens=50, max_tokens=50)


async def test_the_message_and_the_header_name_the_same_whole_seconds() -> None:
    world = World(requests_per_minute=1)
    await world.ask()
    world.clock.advance(59.7)
    with pytest.raises(RateLimited, match=r"Retry in 1 s\.") as refused:
        await world.ask()
    assert 0.0 < refused.value.retry_after < 1.0


async def test_a_request_that_reached_no_pod_costs_nothing() -> None:
    world = World(requests_per_minute=1, tokens_per_minute=100, concurrent_requests=1)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            async with world.limiter.admit(world.request(tokens=50, max_tokens=50)):
                raise RuntimeError("no pod is ready")
    await world.ask(tokens=50, max_tokens=50)


async def test_a_request_that_was_sent_to_no_pod_costs_nothing() -> None:
    world = World(requests_per_minute=1, tokens_per_minute=100)
    for ending in (Ending.UPSTREAM_FAILED, Ending.CLIENT_GONE):
        async with world.limiter.admit(request := world.request(tokens=50, max_tokens=50)):
            world.start(request).ending = Ending.UPSTREAM_FAILED
            world.start(request).ending = ending
    await world.ask(tokens=50, max_tokens=50)


async def test_a_request_that_only_its_first_pod_received_costs_a_request() -> None:
    world = World(requests_per_minute=1, tokens_per_minute=100)
    async with world.limiter.admit(request := world.request(tokens=50, max_tokens=50)):
        world.send(request, status=None).ending = Ending.UPSTREAM_FAILED
        world.start(request).ending = Ending.UPSTREAM_FAILED
    with pytest.raises(RateLimited, match="1 requests per minute"):
        await world.ask()


async def test_cached_tokens_count_with_their_weight() -> None:
    world = World(input_tokens_per_minute=100, cached_token_weight=0.1)
    await world.ask(tokens=100, usage=Usage(100, 5, cached_tokens=100))
    await world.ask(tokens=90, usage=Usage(90, 5))
    with pytest.raises(RateLimited, match="input tokens"):
        await world.ask(tokens=10)


async def test_output_tokens_have_their_own_limit() -> None:
    world = World(output_tokens_per_minute=20)
    await world.ask(tokens=1000, max_tokens=20, usage=Usage(1000, 20))
    with pytest.raises(RateLimited, match="output tokens"):
        await world.ask(max_tokens=1)


async def test_concurrent_requests_are_limited() -> None:
    world = World(concurrent_requests=1)
    async with AsyncExitStack() as running:
        await running.enter_async_context(world.limiter.admit(world.request()))
        with pytest.raises(RateLimited, match="1 requests at the same time"):
            await world.ask()
        await world.ask("b")
    await world.ask()


async def test_the_refusal_names_the_limit_that_lasts_longest() -> None:
    world = World(concurrent_requests=1, requests_per_minute=1)
    async with world.limiter.admit(world.request()):
        with pytest.raises(RateLimited, match="1 requests per minute") as refused:
            await world.ask()
        assert refused.value.retry_after == pytest.approx(60.0)
        world.clock.advance(59.5)
        with pytest.raises(RateLimited, match="1 requests at the same time") as refused:
            await world.ask()
        assert refused.value.retry_after == 1.0


async def test_a_failed_request_no_longer_counts_as_running() -> None:
    world = World(concurrent_requests=1)
    with pytest.raises(RuntimeError):
        async with world.limiter.admit(world.request()):
            raise RuntimeError("boom")
    await world.ask()


async def test_all_keys_of_a_tenant_share_its_limits() -> None:
    world = World(tenant=Limits(requests_per_minute=2))
    await world.ask("a")
    await world.ask("b")
    with pytest.raises(RateLimited, match="'acme'"):
        await world.ask("a")


async def test_a_request_that_one_limit_refuses_is_not_charged_to_the_other() -> None:
    world = World(tenant=Limits(requests_per_minute=1), requests_per_minute=2)
    await world.ask("a")
    with pytest.raises(RateLimited, match="'acme'"):
        await world.ask("a")
    world.clock.advance(60.0)
    await world.ask("a")


async def test_a_daily_budget_lasts_until_midnight() -> None:
    world = World(tokens_per_day=100)
    await world.ask(usage=Usage(60, 60))
    with pytest.raises(RateLimited, match="tokens per day") as refused:
        await world.ask()
    world.clock.advance(refused.value.retry_after)
    await world.ask()


@pytest.mark.parametrize("usage", [Usage(90, 90), Usage(1, 1)])
async def test_usage_that_is_known_after_midnight_belongs_to_the_day_of_its_request(usage: Usage) -> None:
    world = World(tokens_per_day=100)
    spent: list[float] = []
    world.limiter.on_spent = lambda who, running, amounts: spent.append(amounts[4])
    async with world.limiter.admit(request := world.request(tokens=30, max_tokens=30)):
        attempt = world.send(request)
        world.clock.advance(SECONDS_PER_DAY)
        await world.ask(usage=Usage(40, 40))
        attempt.usage = usage
    assert world.used == 80.0
    assert spent == [60.0, 20.0, 60.0, 0.0], "other processes do not charge it either"


async def test_changed_limits_keep_the_day_of_running_requests() -> None:
    world = World(tokens_per_day=100)
    async with world.limiter.admit(request := world.request()):
        world.send(request, Usage(60, 60))
        world.clock.advance(1.0)
        world.named["own"] = Limits(tokens_per_day=110)
        await world.ask(usage=Usage(1, 1))
    with pytest.raises(RateLimited, match="110 tokens per day"):
        await world.ask()


async def test_a_shadow_limit_only_counts() -> None:
    world = World(requests_per_minute=1, shadow=True)
    await world.ask()
    await world.ask()
    assert world.counted == [("key", "a", True)]


async def test_responses_show_the_remaining_limits() -> None:
    world = World(requests_per_minute=60, tokens_per_minute=600)
    attempt = await world.ask(tokens=30, max_tokens=30)
    assert dict(attempt.response_headers) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "540",
        "x-ratelimit-reset-tokens": "6s",
    }


def test_usage_is_requested_if_tokens_are_limited() -> None:
    identity = Identity("a", "acme", limits="own")
    assert not World(requests_per_minute=1).limiter.counts_tokens(identity)
    assert World(tokens_per_day=1).limiter.counts_tokens(identity)
    assert World(tenant=Limits(output_tokens_per_minute=5)).limiter.counts_tokens(identity)


async def test_a_shadow_limit_is_not_shown_to_clients() -> None:
    world = World(requests_per_minute=1, shadow=True)
    assert (await world.ask()).response_headers == []


async def test_a_refusal_shows_the_remaining_limits() -> None:
    world = World(requests_per_minute=1, tokens_per_minute=600)
    await world.ask(usage=Usage(10, 0))
    with pytest.raises(RateLimited) as refused:
        await world.ask()
    headers = dict(refused.value.headers)
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == ("0", "590")


async def test_the_tighter_of_key_and_tenant_is_shown() -> None:
    world = World(tenant=Limits(requests_per_minute=3), requests_per_minute=60)
    headers = dict((await world.ask()).response_headers)
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("3", "2")


async def test_a_stream_without_usage_costs_a_token_per_chunk() -> None:
    world = World(tokens_per_minute=100)
    request = world.request(tokens=10, max_tokens=90, stream=True)
    async with world.limiter.admit(request):
        world.send(request).chunks = 20
    await world.ask(tokens=10, max_tokens=60)
    with pytest.raises(RateLimited):
        await world.ask(tokens=10, max_tokens=10)


async def test_a_client_that_leaves_before_the_response_pays_for_the_prompt() -> None:
    world = World(tokens_per_minute=100)
    request = world.request(tokens=50, max_tokens=50)
    async with world.limiter.admit(request):
        world.send(request, status=None).ending = Ending.CLIENT_GONE
    with pytest.raises(RateLimited):
        await world.ask(tokens=30, max_tokens=30)
    await world.ask(tokens=25, max_tokens=25)


async def test_a_request_that_ends_by_its_own_deadline_pays_for_the_prompt() -> None:
    world = World(tokens_per_minute=100)
    headers = {TIME_LIMIT: "100"}
    request = changed(world.request(tokens=50, max_tokens=50), headers=headers, deadline=world.clock.now())
    async with world.limiter.admit(request):
        world.send(request, status=None).ending = Ending.TIMED_OUT
    with pytest.raises(RateLimited):
        await world.ask(tokens=30, max_tokens=30)
    await world.ask(tokens=25, max_tokens=25)


async def test_a_request_that_times_out_at_the_pod_costs_no_tokens() -> None:
    world = World(tokens_per_minute=100)
    request = changed(world.request(tokens=50, max_tokens=50), deadline=world.clock.now())
    async with world.limiter.admit(request):
        world.send(request, status=None).ending = Ending.TIMED_OUT
    await world.ask(tokens=50, max_tokens=50)


async def test_an_unnamed_tenant_has_the_default_limits() -> None:
    world = World()
    limiter = RateLimiter({"few": Limits(requests_per_minute=1)}, {"*": "few"}, world.clock, world.limited)
    async with limiter.admit(request := world.request("a")):
        attempt = Attempt(request, Decision(POD), POD, 0, 0.0)
        limiter.attempt_started(attempt)
        attempt.sent_at = 0.0
    with pytest.raises(RateLimited, match="'acme'"):
        async with limiter.admit(world.request("b")):
            pass


async def test_a_tenant_that_is_listed_without_limits_has_none() -> None:
    world = World()
    limiter = RateLimiter({"few": Limits(requests_per_minute=1)}, {"acme": "", "*": "few"}, world.clock, world.limited)
    assert limiter.meters(Identity("a", "acme")) == []
    assert len(limiter.meters(Identity("a", "other"))) == 1


@pytest.mark.parametrize(("status", "usage"), [(None, None), (200, Usage(50, 1))])
async def test_a_client_that_leaves_before_its_decode_pod_got_the_request_pays_for_the_prefill(
    status: int | None, usage: Usage | None
) -> None:
    world = World(tokens_per_minute=100)
    request = world.request(tokens=50, max_tokens=50)
    async with world.limiter.admit(request):
        world.start(request).stage = Stage.DECODE
        prefill = Attempt(request, Decision(POD), POD, 0, world.clock.now())
        prefill.stage, prefill.for_client = Stage.PREFILL, False
        world.limiter.attempt_started(prefill)
        prefill.sent_at, prefill.status, prefill.usage = world.clock.now(), status, usage
        prefill.ending = Ending.CLIENT_GONE if status is None else Ending.COMPLETE
    with pytest.raises(RateLimited):
        await world.ask(tokens=30, max_tokens=30)
    await world.ask(tokens=24, max_tokens=25)


async def test_a_request_that_goes_on_to_a_fallback_model_counts_once() -> None:
    world = World(requests_per_minute=1, tokens_per_minute=100)
    request = world.request()
    async with world.limiter.admit(request):
        world.send(request, status=None).ending = Ending.UPSTREAM_FAILED
    again = with_fresh_state(request)
    async with world.limiter.admit(again):
        world.send(again, Usage(50, 50))
    with pytest.raises(RateLimited):
        await world.ask()


async def test_a_request_that_was_sent_nowhere_counts_when_it_goes_on_to_a_fallback_model() -> None:
    world = World(requests_per_minute=1)
    request = world.request()
    async with world.limiter.admit(request):
        world.start(request)
    again = with_fresh_state(request)
    async with world.limiter.admit(again):
        world.send(again)
    with pytest.raises(RateLimited):
        await world.ask()


async def test_tokens_that_were_transferred_from_a_prefill_pod_do_not_count_as_cached() -> None:
    world = World(tokens_per_minute=100, cached_token_weight=0.1)
    request = world.request(tokens=50, max_tokens=50)
    async with world.limiter.admit(request):
        attempt = world.send(request, Usage(60, 10, cached_tokens=59))
        attempt.stage = Stage.DECODE
    with pytest.raises(RateLimited):
        await world.ask(tokens=20, max_tokens=20)


async def test_changed_limits_keep_their_usage() -> None:
    world = World(requests_per_minute=2, tokens_per_day=100)
    await world.ask(usage=Usage(60, 0))
    async with world.limiter.admit(request := world.request()):
        world.send(request)
        world.named["own"] = Limits(requests_per_minute=3, tokens_per_day=100, concurrent_requests=1)
        with pytest.raises(RateLimited, match="1 requests at the same time"):
            await world.ask()
    world.named["own"] = Limits(requests_per_minute=3, tokens_per_day=50)
    with pytest.raises(RateLimited, match="50 tokens per day"):
        await world.ask()
    world.named["own"] = Limits(requests_per_minute=3)
    await world.ask()
    with pytest.raises(RateLimited, match="3 requests per minute"):
        await world.ask()


async def test_changed_default_limits_keep_their_usage() -> None:
    world = World(requests_per_minute=2)
    await world.ask()
    world.limiter.limits = {"own": Limits(requests_per_minute=9), "all": Limits(requests_per_minute=1)}
    world.limiter.tenants = {"acme": "all"}
    await world.ask()
    with pytest.raises(RateLimited, match="'acme'"):
        await world.ask()
    world.limiter.limits, world.limiter.tenants = {"own": Limits(requests_per_minute=2)}, {}
    with pytest.raises(RateLimited, match="'a'"):
        await world.ask()


async def test_usage_of_long_idle_keys_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "MOST_METERS", 10)
    world = World(requests_per_minute=1)
    for number in range(30):
        await world.ask(f"key-{number}")
        world.clock.advance(60.0)
    assert len(list(world.limiter.known())) <= 11
    await world.ask("key-29")


async def test_usage_of_running_requests_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "MOST_METERS", 10)
    world = World(concurrent_requests=1)
    async with world.limiter.admit(world.request("busy")):
        for number in range(30):
            await world.ask(f"key-{number}")
        with pytest.raises(RateLimited):
            await world.ask("busy")
