"""The events in the life of a request, and the listeners that observe them.

Whatever observes requests is a `Listener` in one ordered list: the listeners of all pools (`_listeners` in serving.py),
then the admissions of the pool. The hooks of plugins are no listeners; they are called after all listeners. A listener
runs on the event loop, in the tick of the event, and must not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.core.attempt import Attempt, Ending
    from proxy.core.decision import Decision, DecisionRecord
    from proxy.core.endpoint import Endpoint
    from proxy.core.errors import Reason, RequestError
    from proxy.core.ports import ClientRequest
    from proxy.core.request import InferenceRequest

log = logging.getLogger(__name__)

Hook = Callable[["Attempt", "Endpoint"], object]
"""A bound PreRequest.pre_request or PostResponse.post_response."""


class Listener:
    """An observer of requests. A subclass overrides the methods of the events that it needs."""

    __slots__ = ()

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision,
        started: float,
        record: DecisionRecord | None,
    ) -> None:
        """A pod was chosen. `candidates`: the pods before the filters; `Decision.candidates` returns those after.
        `started`: when the decision began, before admissions narrowed the candidates; in monotonic seconds. `record`:
        None for most decisions; see `DecisionSampler`."""

    def not_scheduled(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        error: RequestError,
        record: DecisionRecord | None,
    ) -> None:
        """The scheduler chose none of the candidates and raised `error`. Not called for refusals before or after."""

    def attempt_started(self, attempt: Attempt) -> None:
        """An attempt is about to be sent, in the tick in which its endpoint was chosen."""

    def started_on_watched_pod(self, attempt: Attempt) -> None:
        """An attempt starts on a pod on which others have failed (`Endpoint.is_watched`); comes after
        `attempt_started`."""

    def first_byte(self, attempt: Attempt) -> None:
        """The first byte of the body of a pod's response is relayed; `status` and `first_byte_at` are set."""

    def ended_with_evidence(self, attempt: Attempt, error: BaseException | None) -> None:
        """An attempt ended that is evidence about its pod. Called before `attempt_ended`, for every attempt except a
        complete response with status 200 on a pod that is not watched (`Endpoint.is_watched`): so also for other
        statuses, for clients that left, and for successes on a pod that breakers watch."""

    def response_stored(self, attempt: Attempt, error: BaseException | None) -> None:
        """The pod keeps the response under `attempt.response_id`. Called when a stream starts, and when an attempt has
        ended, before `attempt_ended`."""

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        """An attempt is over; its fields are final, `ending` is set. Called once for each attempt that started.

        `error`: what the relay raised, if anything. A response that fails after it has started raises nothing: look at
        `attempt.ending`."""

    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        """The client has its response, or has left. Called once for each request, on the listeners of all pools only: a
        request may end without a pool, so admissions do not get it.

        `status`: the one that was sent; 499 if the client left before. `outcome`: a Reason if the request was refused.
        `attempt`: the last one, if there was any. `sent`: bytes of a response of kvlane's own."""


class Hooks:
    """The hooks of a pool's plugins, which are called after all listeners; none, unless a subclass has some."""

    __slots__ = ()

    pre_request_hooks: Sequence[Hook] = ()
    post_response_hooks: Sequence[Hook] = ()

    def hook_failed(self, hook: Hook, attempt: Attempt, error: Exception) -> None:
        """Count and log the error of a hook. The request and the other hooks go on."""

    def call_recorded(self, hook: Hook, attempt: Attempt) -> None:
        """Call a hook for an attempt that has a record, and note how long it took."""

    def forget(self, endpoint: Endpoint) -> None:
        """Drop the state of a pod that is gone."""


NO_HOOKS = Hooks()


class Listeners:
    """For each event the methods that implement it, in the order of the listeners."""

    def __init__(self, listeners: Sequence[Listener] = (), hooks: Hooks = NO_HOOKS) -> None:
        self._failed: set[str] = set()
        self.all = tuple(listeners)
        self.decided = tuple(each.decided for each in _overriding(self.all, "decided"))
        self.not_scheduled = tuple(each.not_scheduled for each in _overriding(self.all, "not_scheduled"))
        self.attempt_started = tuple(each.attempt_started for each in _overriding(self.all, "attempt_started"))
        self.started_on_watched_pod = tuple(
            each.started_on_watched_pod for each in _overriding(self.all, "started_on_watched_pod")
        )
        self.first_byte: tuple[Callable[[Attempt], object], ...] = tuple(
            each.first_byte for each in _overriding(self.all, "first_byte")
        )
        self.ended_with_evidence = tuple(
            each.ended_with_evidence for each in _overriding(self.all, "ended_with_evidence")
        )
        self.response_stored = tuple(each.response_stored for each in _overriding(self.all, "response_stored"))
        self.attempt_ended = tuple(each.attempt_ended for each in _overriding(self.all, "attempt_ended"))
        self.request_ended = tuple(each.request_ended for each in _overriding(self.all, "request_ended"))
        self.pre_request_hooks, self.post_response_hooks = hooks.pre_request_hooks, hooks.post_response_hooks
        self.call_recorded, self.hook_failed, self.forget = hooks.call_recorded, hooks.hook_failed, hooks.forget

    def plus(self, *more: Listener, hooks: Hooks = NO_HOOKS) -> Listeners:
        """Return these with others behind them, and the hooks of a pool's plugins."""
        return Listeners((*self.all, *more), hooks)

    def at_first_byte(self, call: Callable[[Attempt], object]) -> Listeners:
        """Return these, for one attempt, with a function that is called at its first byte too."""
        listeners = copy(self)
        listeners.first_byte += (call,)
        return listeners

    def failed(self, listener: Callable[..., object], request_id: str) -> None:
        """Log the error that is being handled, once for each listener. The request and the other listeners go on."""
        name = listener.__qualname__
        if name not in self._failed:
            self._failed.add(name)
            log.exception("listener %s failed for request %s; its further failures are not logged", name, request_id)


def _overriding(listeners: Sequence[Listener], event: str) -> list[Listener]:
    return [each for each in listeners if getattr(type(each), event) is not getattr(Listener, event)]


NO_LISTENERS = Listeners()
