"""From a request and the pods to a decision, in one tick of the event loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from proxy.core.decision import Decision, ProfileResult, decided
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, RequestError
from proxy.core.params import suggestion
from proxy.core.plugin import ProfileHandler
from proxy.core.request import InferenceRequest
from proxy.scheduling.profile import Profile

log = logging.getLogger(__name__)

MOST_PROFILE_RUNS = 16
"""A handler that yields more often will never come to a decision."""

OnShadow = Callable[[InferenceRequest, Decision, ProfileResult], None]
"""Told the decision that was made for a request, and what a shadow profile would have ranked."""


class Schedules(Protocol):
    """Who may stand in the place of a `Scheduler`."""

    def schedule(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> Decision:
        """Raises RequestError."""


class Scheduler:
    """Runs the dialogue with the profile handler, if it wants one, then the shadow profiles."""

    def __init__(
        self,
        handler: ProfileHandler,
        profiles: Mapping[str, Profile],
        shadows: Sequence[Profile] = (),
        on_shadow: OnShadow | None = None,
    ) -> None:
        self._handler = handler
        self._profiles = profiles
        self._shadows = tuple(shadows)
        self._on_shadow = on_shadow
        only = handler.only_profile()
        self._only = None if only is None else profiles.get(only)

    def schedule(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> Decision:
        """Raises what the handler lets through: a RequestError that says why there is no decision."""
        if self._only is None:
            decision = self._discussed(request, endpoints, attempt)
        else:
            decision = decided(self._only.name, self._only.order(request, endpoints, attempt))
        for shadow in self._shadows:
            self._observe(shadow, decision, request, endpoints, attempt)
        return decision

    def alone(self, profile: str, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Decision:
        """As this one profile, which may be a shadow, would decide. Raises RequestError."""
        profiles = {**self._profiles, **{shadow.name: shadow for shadow in self._shadows}}
        if profile not in profiles:
            raise BadRequest(f"There is no profile '{profile}'{suggestion(profile, list(profiles))}.", param="profile")
        return Decision.from_result(profiles[profile].run(request, endpoints))

    def _discussed(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int) -> Decision:
        plan = self._handler.plan(request)
        try:
            name = next(plan)
            for _ in range(MOST_PROFILE_RUNS):
                try:
                    profile = self._profiles.get(name) or self._missing(name)
                    result = profile.run(request, endpoints, attempt)
                except RequestError as error:
                    name = plan.throw(error)
                else:
                    name = plan.send(result)
        except StopIteration as end:
            decision: Decision = end.value
            return decision
        plan.close()
        raise RequestError(f"The profile handler came to no decision in {MOST_PROFILE_RUNS} profile runs.")

    @staticmethod
    def _missing(name: str) -> NoReturn:
        raise RequestError(f"The profile handler asked for the profile '{name}', which does not exist.")

    def _observe(
        self,
        shadow: Profile,
        decision: Decision,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        attempt: int,
    ) -> None:
        """A shadow is reported and never acted upon, so nothing of it may reach the request."""
        try:
            result = shadow.run(request, endpoints, attempt)
            if self._on_shadow is not None:
                self._on_shadow(request, decision, result)
        except RequestError as error:
            log.debug("shadow profile %s: %s", shadow.name, error)
        except Exception:
            log.exception("shadow profile %s failed", shadow.name)
