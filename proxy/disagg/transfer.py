"""Requests whose prompt one pod computes and whose response another sends: the order of the attempts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from proxy.core.attempt import CRASHES, NOT_YET, Attempt, Ending, Stage, crashes_of
from proxy.core.decision import SPLIT, Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import (
    BadGateway,
    BadRequest,
    ConnectFailed,
    GatewayTimeout,
    KvlaneError,
    NoEndpoints,
    RankOutOfRange,
    UpstreamFailed,
)
from proxy.core.ports import AttemptScope, Clock, Random, Relay
from proxy.core.request import InferenceRequest, changed, deadline_has_passed
from proxy.core.tasks import Tasks, run_together
from proxy.disagg.connector import Connector, Split
from proxy.disagg.connectors import connector_named
from proxy.disagg.requests import (
    SPLIT_PATHS,
    encode_bodies,
    fields_of_pod,
    for_prefill,
    is_flat,
    merged,
    why_whole,
    with_fields,
)
from proxy.disagg.settings import DisaggregationSettings
from proxy.fleet.ledger import Ledger
from proxy.openai.bodies import has_many_values, object_in, with_long_integers
from proxy.reliability.failover import Failover, RetryState
from proxy.telemetry.metrics import Counter

log = logging.getLogger(__name__)

STORED = "one pod stores the previous response"

FAILED, REFUSED = "prefill-failed", "prefill-refused"

ABOUT_THE_REQUEST = frozenset((400, 413, 415, 422))
"""Statuses of a prefill pod which mean that no pod can serve the request, so the client gets that response. Others,
such as 401 or 404, concern the pod, and the decode pod computes the prompt."""

GRACE = 0.25
"""Seconds in which the response must begin after its prefill has failed: a pod that has the cache begins by then."""

Counted = Callable[[str], Counter]
"""Returns what counts requests with a result."""


@dataclass(eq=False)
class SplitRequests:
    """Makes a `SplitRequest` of each request whose decision has stages."""

    settings: DisaggregationSettings
    failover: Failover
    ledger: Ledger
    clock: Clock
    random: Random
    tasks: Tasks
    """Runs transfers after their client has left."""
    counted: Counted
    expose_endpoint: bool = True
    """Whether to name the prefill pod to clients."""

    def __post_init__(self) -> None:
        self.connector: Connector = connector_named(self.settings.connector)()
        self.prefill_timeout = self.settings.prefill_timeout

    def of(
        self, request: InferenceRequest, decision: Decision, relay: Relay, scope_of: AttemptScope
    ) -> tuple[Decision, SplitRequest | None]:
        """Return None, and the decision without stages, if one pod has to do everything. Raise RequestError if no pod
        can."""
        outcome = decision.split_outcome
        if outcome and outcome != SPLIT:
            self.counted(outcome).add()
        if not (decision.prefill or decision.encode):
            if self.connector.needs_pair and request.path in SPLIT_PATHS:
                raise NoEndpoints(
                    "The request needs a prefill and a decode pod, but was not split between them:"
                    f" {outcome or STORED}."
                )
            return decision, None
        fields, why = None, "many-values"
        if not has_many_values(request.body):
            fields = object_in(request.body)
            why = (
                "not-json" if fields is None else why_whole(request.path, fields, self.connector.generates_first_token)
            )
        if fields is None or why:
            self.counted(why).add()
            if self.connector.needs_pair and request.path in SPLIT_PATHS:
                raise BadRequest(
                    f"The request needs a prefill and a decode pod, but cannot be split between them: {why}."
                )
            return decision._replace(prefill=(), encode=(), split_outcome=why), None
        return decision, SplitRequest(self, with_long_integers(fields, request.body), relay, scope_of)


class Transfer(NamedTuple):
    """A computed prompt: the fields for its decode request, and its cached tokens."""

    fields: dict[str, Any]
    cached: int | None


class PrefillRejected(KvlaneError):
    """The prefill pod rejected the client's request. `body` is its response."""

    def __init__(self, prefill: Attempt, body: bytes) -> None:
        super().__init__(f"the prefill pod responded with {prefill.status}")
        self.prefill = prefill
        self.body = body


@dataclass(slots=True)
class SplitRequest:
    """One request in stages. The decode attempt starts first, so that its pod keeps capacity for it; the prefill
    attempt ends with the first byte of the response, because the decode pod has the cache then.

    A response of a prefill pod that rejects the request goes to the client. A prefill that fails is tried on one other
    pod; after that the decode pod computes the prompt, in an attempt for the whole request. When the decode pod fails,
    the next one gets the cache if the failed one never requested it, else a prefill of its own.
    """

    shared: SplitRequests
    fields: dict[str, Any]
    """Of the client's body."""
    relay: Relay
    scope_of: AttemptScope
    tried: list[Endpoint] = field(default_factory=list)
    """The prefill pods that were tried."""
    transfer: Transfer | None = None
    """Not sent to any decode pod yet."""
    is_counted: bool = False
    """Whether its result is counted, which is that of the first decode attempt."""
    encoded: dict[str, Any] | None = None
    """Fields of the encode pods for the next stage; None before they were requested."""

    async def run(self, attempt: Attempt, prefill: Attempt | None = None) -> None:
        """`prefill` is another attempt than one on the best pod. Raise what `Relay.relay` raises."""
        try:
            await self._run(attempt, prefill)
        except PrefillRejected as refused:
            self._count(REFUSED)
            self.relay.pass_on(refused.prefill, refused.body)

    async def _run(self, attempt: Attempt, prefill: Attempt | None) -> None:
        connector = self.shared.connector
        if prefill is None and not (attempt.is_continuation or self.transfer) and not self._needs_care(attempt):
            left = self._left(attempt)
            prefill = self._attempt(attempt, Stage.PREFILL, left) if left else None
        has_role, has_stages = attempt.endpoint in attempt.decision.prefill, bool(prefill or self.transfer)
        if connector.needs_pair and (has_role or not has_stages):
            raise UpstreamFailed("no pod is left to compute the prompt, and it cannot do so itself")
        if has_stages:
            attempt.stage = Stage.DECODE
        failure, is_left_alone = None, False
        with self.scope_of(attempt), ExitStack() as held:
            if self.encoded is None:
                with _no_fault_of(attempt):
                    self.encoded = await self._encode(attempt)
            if attempt.stage is Stage.WHOLE:
                await self._whole(attempt)
            elif prefill is not None and connector.at_once:
                failure = await self._both(attempt, prefill)
            else:
                is_left_alone = not await self._one_by_one(attempt, prefill, held)
        if failure is not None and prefill is not None:
            following = None
            if not connector.needs_pair or isinstance(failure, RankOutOfRange):
                following = await self._following(prefill, failure)
            if following is not None:
                await self._run(self._again(attempt), following)
                return
            self._count(FAILED)
            if connector.needs_pair:
                raise UpstreamFailed(f"the pod for its prompt failed: {failure}")
            is_left_alone = True
        if is_left_alone:
            again = self._again(attempt)
            with self.scope_of(again):
                await self._whole(again)

    def _count(self, result: str) -> None:
        if not self.is_counted:
            self.is_counted = True
            self.shared.counted(result).add()

    async def _whole(self, attempt: Attempt) -> None:
        if not self.encoded or attempt.is_continuation:
            await self.relay.relay(attempt)
        else:
            await self._relay_with(attempt, self.encoded)

    def _again(self, attempt: Attempt) -> Attempt:
        """Return an attempt that starts now: predictors learn how the pod does by itself."""
        again = Attempt(attempt.request, attempt.decision, attempt.endpoint, attempt.number, self.shared.clock.now())
        again.retries = attempt.retries = attempt.retries or RetryState()
        return again

    # One after the other: the decode pod gets what the prefill pod responds.

    async def _one_by_one(self, attempt: Attempt, prefill: Attempt | None, held: ExitStack) -> bool:
        """Return False if no pod has computed the prompt, and the decode pod can."""
        attempt.listeners = attempt.listeners.at_first_byte(lambda _: held.close())
        if prefill is not None:
            with _no_fault_of(attempt):
                self.transfer = await self._prefilled(attempt, prefill, held)
        self._count(SPLIT if self.transfer else FAILED)
        if self.transfer is not None:
            await self._decode(attempt, self.transfer)
            return True
        attempt.ending = Ending.EVICTED
        if self.shared.connector.needs_pair:
            raise UpstreamFailed("no pod computed the prompt, and it cannot do so itself")
        return False

    async def _prefilled(self, attempt: Attempt, prefill: Attempt, held: ExitStack) -> Transfer | None:
        """Have the prompt computed by the pod of `prefill`, or another; None if none could. The prefill attempt stays
        open until `held` closes."""
        splits: list[Split] = []
        found = await self._collect(prefill, lambda each: splits.append(self._split(each, attempt.endpoint)), held)
        if found is None:
            return None
        prefill, body = found
        if prefill.status in ABOUT_THE_REQUEST:
            raise PrefillRejected(prefill, body)
        response = fields_of_pod(body) if prefill.status == 200 else None
        fields = None if response is None else self._parameters(prefill, response)
        if fields is None:
            held.close()
            level = logging.WARNING if prefill.status == 200 else logging.INFO
            text = "request %s: no usable KV transfer from pod %s (status %s); the decode pod computes the prompt"
            log.log(level, text, attempt.request.id, prefill.endpoint.name, prefill.status)
            return None
        if (other_id := splits[-1].request_id) is not None:
            attempt.upstream_headers.append(("x-request-id", other_id))
        self._name(attempt, prefill.endpoint)
        return Transfer(fields, prefill.usage.cached_tokens if prefill.usage else None)

    def _parameters(self, prefill: Attempt, response: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of the response for the decode pod. A connector of another package may raise."""
        connector = self.shared.connector
        try:
            fields = connector.hand_over(response)
            return fields if fields is None or is_flat(fields) else None
        except Exception:
            log.exception("connector %s: failed to read the response of pod %s", connector.name, prefill.endpoint.name)
            return None

    async def _decode(self, attempt: Attempt, transfer: Transfer) -> None:
        attempt.cached_to_report = transfer.cached
        was_sent = True
        try:
            await self._relay_with(attempt, transfer.fields)
        except ConnectFailed:
            was_sent = self.shared.connector.needs_pair
            raise
        except asyncio.CancelledError:
            if attempt.sent_at is None and transfer.fields:  # without fields the prefill pod keeps nothing
                # A pod that got the request may have fetched the cache; its blocks may be another prompt's by now.
                self.shared.tasks.start(self._fetch(attempt, transfer), "fetching a cache without a client")
            raise
        finally:
            if was_sent:
                self.transfer = None

    async def _fetch(self, attempt: Attempt, transfer: Transfer) -> None:
        """Free the prefill pod of the cache, which it keeps until it is fetched or expires."""
        body = for_prefill(attempt.request.path, self.fields, transfer.fields)
        try:
            fetching = self._attempt(attempt, Stage.DECODE, (attempt.endpoint,), body)
            fetching.upstream_headers = list(attempt.upstream_headers)
            await self.relay.collect(fetching, self.shared.prefill_timeout)
        except KvlaneError as error:
            log.info("request %s: the prefill pod keeps its KV cache until it expires: %s", attempt.request.id, error)

    # Both at once: the pods find each other.

    async def _both(self, attempt: Attempt, prefill: Attempt) -> UpstreamFailed | None:
        """Run both attempts. A prefill that fails ends the decode attempt, unless that has begun its response: the
        failure is returned. A decode pod that fails after the prefill did not get what it waited for."""
        split = self._split(prefill, attempt.endpoint)
        self._name(attempt, prefill.endpoint)
        begun, lost = asyncio.Event(), list[UpstreamFailed]()
        attempt.listeners, attempt.cached_to_report = attempt.listeners.at_first_byte(lambda _: begun.set()), NOT_YET
        try:
            # The body waits for the relay, so no failure leaves a pending cancellation; see `run_together`.
            async with asyncio.TaskGroup() as group:  # noqa: TID251
                prefilling = group.create_task(self._prefill(attempt, prefill, begun, lost))
                try:
                    await self._relay_with(attempt, split.decode or {})
                except UpstreamFailed as failed:
                    if failed.may_have_crashed and not await self.shared.failover.quarantine.is_alive(attempt.endpoint):
                        await asyncio.wait((prefilling,), timeout=GRACE)  # it may be dying of the same
                    raise
                prefilling.cancel()
        except BaseExceptionGroup as errors:
            error = errors.exceptions[0]
            if any(isinstance(each, UpstreamFailed) and each.may_have_crashed for each in (error, *lost)):
                crashes = crashes_of(attempt.request)
                crashes.add_suspected(prefill)
                crashes.add_suspected(attempt)
            if isinstance(error, PrefillRejected):
                attempt.ending = Ending.EVICTED
                raise error from None
            was_in_vain = bool(lost) and not begun.is_set() and isinstance(error, UpstreamFailed)
            if not lost or not (was_in_vain or attempt.ending is Ending.EVICTED):  # it is the decode pod's own
                raise error from None
            attempt.ending = Ending.EVICTED
            if not begun.is_set():
                return lost[0].with_traceback(None)
        finally:
            attempt.cached_to_report = None if attempt.cached_to_report == NOT_YET else attempt.cached_to_report
        self._count(SPLIT)
        return None

    async def _prefill(
        self, attempt: Attempt, prefill: Attempt, begun: asyncio.Event, lost: list[UpstreamFailed]
    ) -> None:
        """Read the cached tokens of the response; the decode pod has the cache, or does not begin. Failures are added
        to `lost`."""
        try:
            with self.scope_of(prefill):
                body = await self.relay.collect(prefill, self.shared.prefill_timeout)
                self.shared.ledger.first_byte(prefill)
            attempt.cached_to_report = prefill.usage.cached_tokens if prefill.usage else None
            if prefill.status in ABOUT_THE_REQUEST and not await _within(GRACE, begun):
                raise PrefillRejected(prefill, body)
            if prefill.status != 200:
                raise UpstreamFailed(f"it responded with {prefill.status}")
        except (ConnectFailed, RankOutOfRange) as error:
            lost.append(error)
            raise  # It did not get the prompt, so whatever the decode pod begins with is no response to it.
        except UpstreamFailed as error:
            lost.append(error)
            if not await _within(GRACE, begun):
                raise
            log.warning("request %s: pod %s: %s", attempt.request.id, prefill.endpoint.name, error)

    # Attempts whose responses are for the next stage.

    async def _encode(self, attempt: Attempt) -> dict[str, Any]:
        """Divide the media among the encode pods, and return their fields for the next stage, which does itself what
        they do not do."""
        pods = attempt.decision.encode
        bodies = encode_bodies(attempt.request.path, self.fields) if pods else []
        if not bodies:
            return {}
        attempts = []
        for number, body in enumerate(bodies):
            at = number % len(pods)
            attempts.append(self._attempt(attempt, Stage.ENCODE, pods[at:] + pods[:at], body))
        collected = await run_together(*map(self._collect, attempts))
        found = [each for each in collected if each is not None and each[0].status == 200]
        return merged([fields for _, body in found if (fields := fields_of_pod(body)) is not None])

    async def _collect(
        self, attempt: Attempt, prepare: Callable[[Attempt], None] | None = None, held: ExitStack | None = None
    ) -> tuple[Attempt, bytes] | None:
        """Return the attempt that got a response, and the response; None if no pod could. The attempt stays open until
        `held` closes. `prepare` makes the request of each attempt one for its pod. Raise RequestError if no pod may be
        tried any more."""
        while True:
            if prepare is not None:
                prepare(attempt)
            try:
                with ExitStack() as open_attempt:
                    open_attempt.enter_context(self.scope_of(attempt))
                    response = await self.relay.collect(attempt, self.shared.prefill_timeout)
                    self.shared.ledger.first_byte(attempt)
                    if held is not None:
                        held.enter_context(open_attempt.pop_all())
                return attempt, response
            except UpstreamFailed as error:
                following = await self._following(attempt, error.with_traceback(None))
            if following is None:
                return None
            attempt = following

    async def _following(self, attempt: Attempt, error: UpstreamFailed) -> Attempt | None:
        """Return an attempt on one other pod where the stage can be skipped, else on as many pods as any request may
        try. None if no pod is left. Raise RequestError if no pod may be tried any more."""
        is_optional = attempt.stage is Stage.ENCODE or not self.shared.connector.needs_pair
        try:
            following = await self.shared.failover.next_attempt(attempt, error, is_optional)
        except (BadGateway, GatewayTimeout):
            if deadline_has_passed(attempt.request, self.shared.clock.now()):
                raise
            return None
        following.stage, following.for_client = attempt.stage, False
        return following

    def _attempt(self, attempt: Attempt, stage: Stage, pods: tuple[Endpoint, ...], body: bytes = b"") -> Attempt:
        """Return an attempt of the same client on the first of `pods`, with the others as its fallbacks."""
        request = changed(attempt.request, body=body, stream=False, max_tokens=1, usage_added=False, naming=None)
        made = Attempt(request, Decision(pods[0], pods[1:]), pods[0], 0, self.shared.clock.now())
        made.stage, made.for_client = stage, False
        return made

    async def _relay_with(self, attempt: Attempt, fields: dict[str, Any]) -> None:
        """Relay with fields added to the body; a later attempt starts from the client's body again."""
        whole = attempt.request
        attempt.request = changed(whole, body=with_fields(whole.body, fields))
        try:
            await self.relay.relay(attempt)
        finally:
            attempt.request = whole

    def _needs_care(self, attempt: Attempt) -> bool:
        """Return whether the decode pod has to do everything, so that no second pod dies at the same time."""
        connector, crashes = self.shared.connector, attempt.request.state.read(CRASHES)
        return connector.at_once and not connector.needs_pair and crashes is not None and bool(crashes.crashed)

    def _left(self, attempt: Attempt) -> tuple[Endpoint, ...]:
        """Return the pods that have not had the prompt; if it goes to two pods at once and one has died, a survivor."""
        connector, crashes = self.shared.connector, attempt.request.state.read(CRASHES)
        pods = tuple(pod for pod in attempt.decision.prefill if pod is not attempt.endpoint)
        if connector.at_once and crashes is not None and crashes.crashed:
            survivors = tuple(pod for pod in pods if pod in self.tried and pod not in crashes.crashed)
            if survivors:
                return survivors
        left = tuple(pod for pod in pods if pod not in self.tried)
        return pods if not left and connector.needs_pair else left

    def _split(self, prefill: Attempt, decode: Endpoint) -> Split:
        """Make the request of the attempt one for its pod."""
        self.tried.append(prefill.endpoint)
        request, connector = prefill.request, self.shared.connector
        split = connector.split(request.id, prefill.endpoint, decode, self.shared.random)
        extra = {**split.prefill, **(self.encoded or {})}
        prefill.request = changed(
            request, body=for_prefill(request.path, self.fields, extra, connector.generates_first_token)
        )
        if split.request_id:
            prefill.upstream_headers.append(("x-request-id", split.request_id))
        return split

    def _name(self, attempt: Attempt, prefill: Endpoint) -> None:
        if self.shared.expose_endpoint:
            attempt.response_headers.append(("x-kvlane-prefill-endpoint", prefill.name))


async def _within(seconds: float, begun: asyncio.Event) -> bool:
    """Return whether `begun` is set now or within the time in seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await begun.wait()
    return begun.is_set()


@contextmanager
def _no_fault_of(attempt: Attempt) -> Generator[None, None, None]:
    """Around the work of other pods for this attempt."""
    try:
        yield
    except BaseException:
        attempt.ending = attempt.ending or Ending.EVICTED
        raise
