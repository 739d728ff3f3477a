"""The scheduler: from a request and the pods to a decision, in one tick of the event loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from proxy.core.decision import Decision, DecisionRecord, ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, RequestError
from proxy.core.params import suggestion
from proxy.core.plugin import ProfileHandler
from proxy.core.registry import RAISED, UNUSABLE, PluginFaults
from proxy.core.request import InferenceRequest
from proxy.scheduling.profile import Profile

log = logging.getLogger(__name__)

MOST_PROFILE_RUNS = 16
"""Largest number of profile runs of a handler: one that yields more often would never decide."""

DEFAULT_PROFILES = ("default", "decode")
"""Profiles that decide if the handler fails: the first of these that exists, else the first of the file. `decode` is
llm-d's name of the pods that respond."""


class Scheduler:
    """The scheduler of a pool. It runs the profiles that the profile handler yields, then the shadow profiles."""

    def __init__(
        self,
        handler: ProfileHandler,
        profiles: Mapping[str, Profile],
        faults: PluginFaults,
        name: str = "",
        shadows: Sequence[Profile] = (),
    ) -> None:
        """`name` is the handler's in the configuration."""
        self._handler = handler
        self._faults = faults
        self._name = name or handler.plugin_type
        self._profiles = profiles
        self._shadows = tuple(shadows)
        self._only = self._only_profile()

    @property
    def may_split(self) -> bool:
        """Return whether a decision may name pods for several stages of a request."""
        return self._only is None

    def schedule(
        self,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        record: DecisionRecord | None = None,
    ) -> Decision:
        """Return the decision. Raise the RequestError that the handler, or a profile, gives as the reason for no
        decision."""
        if self._only is None:
            endpoints = tuple(endpoints)
            decision = self._discussed(request, endpoints, record)
        else:
            best, *others = self._only.order(request, endpoints, record)
            decision = Decision(best, tuple(others), self._only.name)
        if self._shadows:
            return decision._replace(shadows=tuple(self._shadowed(request, endpoints, record)))
        return decision

    def alone(
        self,
        profile: str,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        record: DecisionRecord | None = None,
    ) -> Decision:
        """Return the decision of this one profile, which may be a shadow. Raise RequestError."""
        profiles = {**self._profiles, **{shadow.name: shadow for shadow in self._shadows}}
        if profile not in profiles:
            known = suggestion(profile, list(profiles)) or f"; there are {', '.join(profiles)}."
            raise BadRequest(f"There is no profile '{profile}'{known}", param="profile")
        return Decision.from_result(profiles[profile].run(request, endpoints, record))

    def _only_profile(self) -> Profile | None:
        try:
            only = self._handler.only_profile()
            return None if only is None else self._profiles.get(only)
        except Exception as error:  # noqa: BLE001  # its `plan` is asked instead
            self._faults.report(self._name, RAISED, "failed to name its only profile", error)
            return None

    def _discussed(
        self, request: InferenceRequest, endpoints: tuple[Endpoint, ...], record: DecisionRecord | None
    ) -> Decision:
        """Return the handler's decision, or the default profile's if the handler fails."""
        default = next(self._profiles[name] for name in (*DEFAULT_PROFILES, *self._profiles) if name in self._profiles)
        try:
            return self._planned(request, endpoints, record)
        except RequestError:
            raise
        except _Undecided as error:
            self._faults.report(self._name, UNUSABLE, f"{error}; profile {default.name} decides")
        except Exception as error:  # noqa: BLE001  # whatever it is, the request goes on
            self._faults.report(self._name, RAISED, f"failed; profile {default.name} decides", error)
        return Decision.from_result(default.run(request, endpoints, record))

    def _planned(
        self, request: InferenceRequest, endpoints: tuple[Endpoint, ...], record: DecisionRecord | None
    ) -> Decision:
        plan = self._handler.plan(request)
        try:
            name = next(plan)
            for _ in range(MOST_PROFILE_RUNS):
                profile = self._profiles.get(name)
                if profile is None:
                    plan.close()
                    raise _Undecided(f"asked for the profile '{name}', which does not exist")
                try:
                    result = profile.run(request, endpoints, record)
                except RequestError as error:
                    name = plan.throw(error)
                else:
                    name = plan.send(result)
        except StopIteration as end:
            if _is_valid(end.value, endpoints):
                decision: Decision = end.value
                return decision
            raise _Undecided("returned no decision among the candidates") from None
        plan.close()
        raise _Undecided(f"came to no decision in {MOST_PROFILE_RUNS} profile runs")

    def _shadowed(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], record: DecisionRecord | None
    ) -> Iterator[ProfileResult]:
        """Yield the ranking of each shadow profile. It must not affect the request."""
        for shadow in self._shadows:
            try:
                yield shadow.run(request, endpoints, record)
            except RequestError as error:
                log.debug("shadow profile %s: %s", shadow.name, error)
            except Exception:
                log.exception("shadow profile %s failed", shadow.name)


class _Undecided(Exception):
    """The handler made no decision; the message says why."""


def _is_valid(decision: object, endpoints: tuple[Endpoint, ...]) -> bool:
    """Return whether it is a decision, and each of its pods a candidate."""
    return isinstance(decision, Decision) and set(endpoints).issuperset(
        chain(decision.candidates(), decision.prefill, decision.encode)
    )
