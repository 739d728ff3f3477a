"""The stages of a request that several pods serve: decode, prefill and encode."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.attempt import Stage
from proxy.core.decision import SPLIT, Decision, ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, NoEndpoints, Problem, RequestError
from proxy.core.params import param, suggestion
from proxy.core.plugin import Decider, PairDecider, ProfileHandler
from proxy.core.ports import Deciders, InstanceName, ProfileNames
from proxy.core.request import DataKey, InferenceRequest
from proxy.plugins.endpoint_data import PEER

NO_DECODE_POD, NO_PREFILL_POD, NO_ENCODE_POD = "no-decode-pod", "no-prefill-pod", "no-encode-pod"
DECIDED_AGAINST = "decided-against"
"""The reason for a stage that was left out; see `Decision.split_outcome`."""

Plan = Generator[str, ProfileResult, Decision]
Found = Generator[str, ProfileResult, tuple[Endpoint, ...]]


@dataclass(frozen=True, slots=True)
class StageProfiles:
    decode: str = param("decode", "profile of the decode pods")
    prefill: str = param("prefill", "profile of the prefill pods")
    encode: str = param("encode", "profile of the encode pods")


@dataclass(frozen=True, slots=True)
class StageDeciders:
    prefill: str = param("", "name of the prefill decider; empty: prompts are never computed by another pod")
    encode: str = param("", "name of the encode decider; empty: media are never encoded by another pod")


@dataclass(frozen=True, slots=True)
class Stages:
    """The dialogue with the scheduler. A stage without a pod is left out: the pod of the next stage does its work.
    Without a decode pod, a prefill pod serves the whole request."""

    peer: DataKey[Endpoint]
    profiles: StageProfiles
    prefill: Decider | None
    encode: Decider | None
    has_prefill: bool
    """Return whether there is a prefill profile."""
    is_prefill_first: bool = False

    def plan(self, request: InferenceRequest) -> Plan:
        return self._prefill_first(request) if self.is_prefill_first else self._decode_first(request)

    def _decode_first(self, request: InferenceRequest) -> Plan:
        try:
            decision = Decision.from_result((yield self.profiles.decode))
        except NoEndpoints as error:
            return (yield from self._without_decode(error))
        self._publish(request, decision.target)
        decision = yield from self._with_encode(request, decision)
        return (yield from self._with_prefill(request, decision))

    def _prefill_first(self, request: InferenceRequest) -> Plan:
        prefill = yield from _ranked(self.profiles.prefill)
        if prefill:
            self._publish(request, prefill[0])
        try:
            decision = Decision.from_result((yield self.profiles.decode))
        except NoEndpoints:
            if not prefill:
                raise
            return Decision(prefill[0], prefill[1:], self.profiles.prefill, split_outcome=NO_DECODE_POD)
        decision = yield from self._with_encode(request, decision)
        return _prefilled(decision, _without(decision.target, prefill))

    def _without_decode(self, error: NoEndpoints) -> Plan:
        if not self.has_prefill:
            raise error
        try:
            return Decision.from_result((yield self.profiles.prefill))._replace(split_outcome=NO_DECODE_POD)
        except NoEndpoints:
            raise error from None

    def _with_encode(self, request: InferenceRequest, decision: Decision) -> Plan:
        decider, target = self.encode, decision.target
        if decider is None or not decider.wants(request, target):
            return decision
        encode = _without(target, (yield from _ranked(self.profiles.encode)))
        if encode and not decider.confirms(request, target, encode):
            return decision
        return decision._replace(encode=encode, split_outcome=SPLIT if encode else NO_ENCODE_POD)

    def _with_prefill(self, request: InferenceRequest, decision: Decision) -> Plan:
        decider, target = self.prefill, decision.target
        if decider is None:
            return decision
        if not decider.wants(request, target):
            return decision._replace(split_outcome=DECIDED_AGAINST)
        if isinstance(decider, PairDecider):
            return (yield from self._with_pair(request, decision, decider))
        prefill = _without(target, (yield from _ranked(self.profiles.prefill)))
        if prefill and not decider.confirms(request, target, prefill):
            return decision._replace(split_outcome=DECIDED_AGAINST)
        return _prefilled(decision, prefill)

    def _with_pair(self, request: InferenceRequest, whole: Decision, decider: PairDecider) -> Plan:
        """Choose the decode pod again, for decoding alone."""
        with decider.pricing(request, Stage.DECODE):
            target, *fallbacks = (yield from _ranked(self.profiles.decode)) or whole.candidates()
        self._publish(request, target)
        with decider.pricing(request, Stage.PREFILL):
            prefill = _without(target, (yield from _ranked(self.profiles.prefill)))
        if prefill and decider.prefers(request, whole.target, target, prefill):
            encode = _without(target, whole.encode)
            return _prefilled(whole._replace(target=target, fallbacks=tuple(fallbacks), encode=encode), prefill)
        self._publish(request, whole.target)
        return whole._replace(split_outcome=DECIDED_AGAINST if prefill else NO_PREFILL_POD)

    def _publish(self, request: InferenceRequest, peer: Endpoint) -> None:
        """Publish the pod of the stage, which may differ each time a request is scheduled."""
        request.state[self.peer] = request.state[PEER] = peer


class StagedHandler(ProfileHandler):
    """A profile handler whose parameters define the stages."""

    __slots__ = ()

    name: InstanceName
    _stages: Stages

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (PEER.of(self.name),)

    def plan(self, request: InferenceRequest) -> Plan:
        return self._stages.plan(request)


def _ranked(profile: str) -> Found:
    """Return the endpoints, best first; an empty list if the profile fails."""
    try:
        result = yield profile
    except RequestError:
        return ()
    return result.endpoints


def _without(target: Endpoint, endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    return tuple(endpoint for endpoint in endpoints if endpoint is not target)


def _prefilled(decision: Decision, prefill: tuple[Endpoint, ...]) -> Decision:
    if not prefill:
        return decision._replace(split_outcome=NO_PREFILL_POD)
    return decision._replace(prefill=prefill, split_outcome=decision.split_outcome or SPLIT)


def stages(
    name: str, profiles: StageProfiles, deciders: StageDeciders, known: ProfileNames, available: Deciders, order: str
) -> Stages:
    """Return the stages. Raise ConfigError with all unknown names and contradictions."""
    faults: list[Problem] = []
    is_prefill_first = order == "prefill-first"
    needed = {"decode": True, "prefill": bool(deciders.prefill) or is_prefill_first, "encode": bool(deciders.encode)}
    for stage, is_needed in needed.items():
        profile, decider = getattr(profiles, stage), getattr(deciders, stage, "")
        if profile not in known and (is_needed or profile != stage):
            near = suggestion(profile, known)
            faults.append(Problem(f"profiles.{stage}", f"there is no profile '{profile}'{near}"))
        if decider and decider not in available:
            near = suggestion(decider, list(available))
            faults.append(Problem(f"deciders.{stage}", f"no decider is named '{decider}'{near}"))
    if is_prefill_first and deciders.prefill:
        why = "with stageOrder prefill-first every prompt is computed elsewhere; take it out"
        faults.append(Problem("deciders.prefill", why))
    if faults:
        raise ConfigError(faults)
    prefill, encode = available.get(deciders.prefill), available.get(deciders.encode)
    return Stages(PEER.of(name), profiles, prefill, encode, profiles.prefill in known, is_prefill_first)
