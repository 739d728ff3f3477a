"""Requests whose prompt one pod computes and another answers: the order of their legs, and what is passed on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.core.attempt import CASUALTIES, NOT_YET, Attempt, Ending, Stage, casualties_of
from proxy.core.decision import SPLIT, Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, ConnectFailed, KvlaneError, NoEndpoints, UpstreamFailed
from proxy.core.ports import Relay, Reserve
from proxy.core.request import InferenceRequest, changed
from proxy.disagg.connector import Split
from proxy.disagg.requests import (
    SPLIT_PATHS,
    Shared,
    Stages,
    fields_of,
    fields_of_pod,
    for_prefill,
    is_flat,
    why_whole,
    with_fields,
)
from proxy.openai.bodies import has_many_values

log = logging.getLogger(__name__)

FAILED, REFUSED = "prefill-failed", "prefill-refused"

ABOUT_THE_REQUEST = frozenset((400, 413, 415, 422))
"""Statuses of a prefill pod that say that no pod can serve the request: the client gets that response. Others, as 401
or 404, are about the pod, and the decode pod computes the prompt."""

GRACE = 0.25
"""Seconds that an answer has to begin once its prefill leg has failed: a pod that has the cache begins then."""


class SplitRequests(Shared):
    """Begins them."""

    def of(
        self, request: InferenceRequest, decision: Decision, relay: Relay, legs: Reserve
    ) -> tuple[Decision, SplitRequest | None]:
        """None, and the decision as that makes it, if one pod is to do all of it. Raises RequestError if no pod can."""
        if decision.why != SPLIT:
            self.counted(decision.why).add()
        if not (decision.prefill or decision.encode):
            if self.connector.needs_pair and request.path in SPLIT_PATHS:
                raise NoEndpoints(f"These pods serve no request alone, and this one was not split: {decision.why}.")
            return decision, None
        fields, why = None, "many-values"
        if not has_many_values(request.body):
            fields = fields_of(request.body)
            why = "not-json" if fields is None else why_whole(request.path, fields, self.connector.begins_answer)
        if fields is None or why:
            self.counted(why).add()
            if self.connector.needs_pair and request.path in SPLIT_PATHS:
                raise BadRequest(f"These pods serve no request that cannot be split; this one cannot: {why}.")
            return decision._replace(prefill=(), encode=(), why=why), None
        return decision, SplitRequest(Stages(self, fields, relay, legs))


class Handed(NamedTuple):
    """A prompt that is computed: what its decode request has to say, and how much of it was cached."""

    fields: dict[str, Any]
    cached: int | None


class PromptRefused(KvlaneError):
    """The prefill pod rejected the client's request. `body` is its response."""

    def __init__(self, prefill: Attempt, body: bytes) -> None:
        super().__init__(f"the prefill pod answered {prefill.status}")
        self.prefill = prefill
        self.body = body


@dataclass(slots=True)
class SplitRequest:
    """Of one request. The decode leg is entered first: its pod is to keep the room; the prefill leg ends when the
    decode pod has begun, for then it has the cache.

    A prefill pod that rejects the request has answered it. One that fails is followed by one other; after that the
    decode pod computes the prompt, in a leg for all of the request. When the decode pod fails, the next one gets the
    cache if the failed one never asked for it, else a prefill of its own.
    """

    stages: Stages
    tried: list[Endpoint] = field(default_factory=list)
    """Prefill pods."""
    handed: Handed | None = None
    """Not yet sent to any decode pod."""
    encoded: dict[str, Any] | None = None
    """What the next stage has to say of its media; None: nobody was asked yet."""

    async def run(self, attempt: Attempt, prefill: Attempt | None = None) -> None:
        """`prefill` is another leg than that of the best pod. Raises what `Relay.relay` raises."""
        try:
            await self._run(attempt, prefill)
        except PromptRefused as refused:
            self._count(REFUSED)
            self.stages.relay.pass_on(refused.prefill, refused.body)

    async def _run(self, attempt: Attempt, prefill: Attempt | None) -> None:
        if prefill is None and not (attempt.continued or self.handed) and not self._needs_care(attempt):
            prefill = self._prefill_leg(attempt)
        needs_pair, has_role = self.stages.shared.connector.needs_pair, attempt.endpoint in attempt.decision.prefill
        if needs_pair and (has_role or (prefill is None and self.handed is None)):
            raise UpstreamFailed("no pod is left to compute the prompt, and it cannot do so itself")
        if prefill is not None or self.handed is not None:
            attempt.stage = Stage.DECODE
        failure, is_left_alone = None, False
        with self.stages.legs(attempt), ExitStack() as held:
            if self.encoded is None:
                with _no_fault_of(attempt):
                    self.encoded = await self.stages.encode(attempt)
            if attempt.stage is Stage.WHOLE:
                await self._whole(attempt)
            elif prefill is not None and self.stages.shared.connector.at_once:
                failure = await self._both(attempt, prefill)
            else:
                is_left_alone = not await self._one_by_one(attempt, prefill, held)
        if failure is not None and prefill is not None:
            await self._after(attempt, prefill, failure)
        elif is_left_alone:
            await self._alone(attempt)

    async def _whole(self, attempt: Attempt) -> None:
        if not self.encoded or attempt.continued:
            await self.stages.relay.relay(attempt)
        else:
            await self._relay_with(attempt, self.encoded)

    async def _after(self, attempt: Attempt, prefill: Attempt, failure: UpstreamFailed) -> None:
        """`prefill` failed beside it, which is no fault of the decode pod: that waits for another one, or for none."""
        if self.stages.shared.connector.needs_pair:
            self._count(FAILED)
            raise UpstreamFailed(f"the pod for its prompt failed: {failure}")
        following = await self.stages.following(prefill, failure)
        if following is None:
            self._count(FAILED)
            await self._alone(attempt)
        else:
            await self._run(self._anew(attempt), following)

    async def _alone(self, attempt: Attempt) -> None:
        leg = self._anew(attempt)
        with self.stages.legs(leg):
            await self._whole(leg)

    def _anew(self, attempt: Attempt) -> Attempt:
        """A leg that begins now: whoever predicts, or knows what is cached, learns what its pod does by itself."""
        leg = Attempt(
            attempt.request, attempt.decision, attempt.endpoint, attempt.number, self.stages.shared.clock.now()
        )
        leg.retries = attempt.retries
        return leg

    async def _one_by_one(self, attempt: Attempt, prefill: Attempt | None, held: ExitStack) -> bool:
        """False if nobody has computed the prompt, and the decode pod can."""
        attempt.listeners = attempt.listeners.at_first_byte(lambda _: held.close())
        if prefill is not None:
            with _no_fault_of(attempt):
                self.handed = await self._prefilled(attempt, prefill, held)
        self._count(SPLIT if self.handed else FAILED)
        if self.handed is not None:
            await self._decode(attempt, self.handed)
            return True
        attempt.ending = Ending.EVICTED
        if self.stages.shared.connector.needs_pair:
            raise UpstreamFailed("nobody computed the prompt, and it cannot do so itself")
        return False

    async def _prefilled(self, attempt: Attempt, leg: Attempt, held: ExitStack) -> Handed | None:
        """By the pod of `leg`, or another; None if by nobody. That leg stays open until `held` closes."""
        splits: list[Split] = []
        answered = await self.stages.ask(leg, lambda one: splits.append(self._split(one, attempt.endpoint)), held)
        if answered is None:
            return None
        leg, body = answered
        if leg.status in ABOUT_THE_REQUEST:
            raise PromptRefused(leg, body)
        answer = fields_of_pod(body) if leg.status == 200 else None
        fields = None if answer is None else self._parameters(leg, answer)
        if fields is None:
            held.close()
            level = logging.WARNING if leg.status == 200 else logging.INFO
            text = "request %s: no usable KV transfer from pod %s (status %s); the decode pod computes the prompt"
            log.log(level, text, attempt.request.id, leg.endpoint.name, leg.status)
            return None
        if (other_id := splits[-1].request_id) is not None:
            attempt.upstream_headers.append(("x-request-id", other_id))
        self._name(attempt, leg.endpoint)
        return Handed(fields, leg.usage.cached_tokens if leg.usage else None)

    def _parameters(self, prefill: Attempt, response: dict[str, Any]) -> dict[str, Any] | None:
        """Return what the response has for the decode pod. A connector of another package may raise."""
        connector = self.stages.shared.connector
        try:
            fields = connector.hand_over(response)
            return fields if fields is None or is_flat(fields) else None
        except Exception:
            log.exception("connector %s: failed to read the response of pod %s", connector.name, prefill.endpoint.name)
            return None

    async def _decode(self, attempt: Attempt, handed: Handed) -> None:
        attempt.told_cached = handed.cached
        was_sent = True
        try:
            await self._relay_with(attempt, handed.fields)
        except ConnectFailed:
            was_sent = self.stages.shared.connector.needs_pair
            raise
        except asyncio.CancelledError:
            if attempt.sent_at is None:
                # A pod that got the request may have fetched the cache; its blocks may be another prompt's by now.
                self.stages.shared.tasks.start(self._fetch(attempt, handed), "fetching a cache that nobody wants")
            raise
        finally:
            if was_sent:
                self.handed = None

    async def _fetch(self, attempt: Attempt, handed: Handed) -> None:
        """Frees the prefill pod of what it keeps until it is fetched, or expires."""
        stages = self.stages
        body = for_prefill(attempt.request.path, stages.fields, handed.fields)
        try:
            leg = stages.leg(attempt, Stage.DECODE, (attempt.endpoint,), body)
            await stages.relay.collect(leg, stages.shared.prefill_timeout)
        except KvlaneError as error:
            log.info("request %s: its cache was left to expire: %s", attempt.request.id, error)

    async def _both(self, attempt: Attempt, prefill: Attempt) -> UpstreamFailed | None:
        """At the same time. A prefill that fails takes the decode leg with it, if that does not begin to answer: why is
        returned. A decode pod that fails after it has not got what it waited for."""
        split = self._split(prefill, attempt.endpoint)
        self._name(attempt, prefill.endpoint)
        begun, lost = asyncio.Event(), list[UpstreamFailed]()
        attempt.listeners, attempt.told_cached = attempt.listeners.at_first_byte(lambda _: begun.set()), NOT_YET
        try:
            async with asyncio.TaskGroup() as group:
                beside = group.create_task(self._beside(attempt, prefill, begun, lost))
                try:
                    await self._relay_with(attempt, split.decode or {})
                except UpstreamFailed as failed:
                    if failed.broke_off and not await self.stages.shared.failover.is_alive(attempt.endpoint):
                        await asyncio.wait((beside,), timeout=GRACE)  # it may be dying of the same
                    raise
                beside.cancel()
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if any(isinstance(each, UpstreamFailed) and each.broke_off for each in (error, *lost)):
                casualties = casualties_of(attempt.request)
                casualties.suspect(prefill)
                casualties.suspect(attempt)
            if isinstance(error, PromptRefused):
                attempt.ending = Ending.EVICTED
                raise error from None
            was_in_vain = bool(lost) and not begun.is_set() and isinstance(error, UpstreamFailed)
            if not lost or not (was_in_vain or attempt.ending is Ending.EVICTED):  # it is the decode pod's own
                raise error from None
            attempt.ending = Ending.EVICTED
            if not begun.is_set():
                return lost[0].with_traceback(None)
        finally:
            attempt.told_cached = None if attempt.told_cached == NOT_YET else attempt.told_cached
        self._count(SPLIT)
        return None

    async def _beside(
        self, attempt: Attempt, prefill: Attempt, begun: asyncio.Event, lost: list[UpstreamFailed]
    ) -> None:
        """Its answer says what was cached; the decode pod has what it needs, or does not answer. `lost` is told why."""
        shared = self.stages.shared
        try:
            with self.stages.legs(prefill):
                body = await self.stages.relay.collect(prefill, shared.prefill_timeout)
                shared.ledger.first_byte(prefill)
            attempt.told_cached = prefill.usage.cached_tokens if prefill.usage else None
            if prefill.status in ABOUT_THE_REQUEST and not await _within(GRACE, begun):
                raise PromptRefused(prefill, body)
            if prefill.status != 200:
                raise UpstreamFailed(f"it responded with {prefill.status}")
        except ConnectFailed as error:
            lost.append(error)
            raise  # It was not asked, so whatever the decode pod begins with is no answer.
        except UpstreamFailed as error:
            lost.append(error)
            if not await _within(GRACE, begun):
                raise
            log.warning("request %s: pod %s: %s", attempt.request.id, prefill.endpoint.name, error)

    async def _relay_with(self, attempt: Attempt, fields: dict[str, Any]) -> None:
        """What comes after this leg begins with what the client sent."""
        whole = attempt.request
        attempt.request = changed(whole, body=with_fields(whole.body, fields))
        try:
            await self.stages.relay.relay(attempt)
        finally:
            attempt.request = whole

    def _prefill_leg(self, attempt: Attempt) -> Attempt | None:
        """On the best pod that this request has not tried; None if there is none."""
        left = self._left(attempt)
        return self.stages.leg(attempt, Stage.PREFILL, left) if left else None

    def _needs_care(self, attempt: Attempt) -> bool:
        """Return whether the decode pod has to do all of it, so that no second pod dies at the same time."""
        connector, casualties = self.stages.shared.connector, attempt.request.state.read(CASUALTIES)
        return connector.at_once and not connector.needs_pair and casualties is not None and bool(casualties.deaths)

    def _left(self, attempt: Attempt) -> tuple[Endpoint, ...]:
        """Pods that have not had the prompt; where it goes to two pods at once and one has died, one that survived."""
        connector, casualties = self.stages.shared.connector, attempt.request.state.read(CASUALTIES)
        pods = tuple(pod for pod in attempt.decision.prefill if pod is not attempt.endpoint)
        if connector.at_once and casualties is not None and casualties.deaths:
            survivors = tuple(pod for pod in pods if pod in self.tried and pod not in casualties.deaths)
            if survivors:
                return survivors
        left = tuple(pod for pod in pods if pod not in self.tried)
        return pods if not left and connector.needs_pair else left

    def _split(self, leg: Attempt, decode: Endpoint) -> Split:
        """Makes the leg's request one for its pod."""
        self.tried.append(leg.endpoint)
        request, shared = leg.request, self.stages.shared
        split = shared.connector.split(request.id, leg.endpoint, decode, shared.random)
        extra = {**split.prefill, **(self.encoded or {})}
        body = for_prefill(request.path, self.stages.fields, extra, shared.connector.begins_answer)
        leg.request = changed(request, body=body)
        if split.request_id:
            leg.upstream_headers.append(("x-request-id", split.request_id))
        return split

    def _name(self, attempt: Attempt, prefill: Endpoint) -> None:
        if self.stages.shared.expose_endpoint:
            attempt.response_headers.append(("x-kvlane-prefill-endpoint", prefill.name))

    def _count(self, what: str) -> None:
        self.stages.shared.counted(what).add()


async def _within(seconds: float, begun: asyncio.Event) -> bool:
    """Return whether `begun` is set, now or within so many seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await begun.wait()
    return begun.is_set()


@contextmanager
def _no_fault_of(attempt: Attempt) -> Generator[None, None, None]:
    """Around what other pods do for it."""
    try:
        yield
    except BaseException:
        attempt.ending = attempt.ending or Ending.EVICTED
        raise
