"""The older name of the handler that splits requests, with the older spellings of its parameters."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from proxy.core.cycle_state import DataKey
from proxy.core.decision import Decision, ProfileResult
from proxy.core.params import param
from proxy.core.plugin import ProfileHandler, plugin
from proxy.core.ports import Deciders, InstanceName, ProfileNames
from proxy.core.request import InferenceRequest
from proxy.plugins.stages import StageDeciders, StageProfiles, Stages, stages
from proxy.plugins.topology import PEER
from proxy.prefix.keys import PREFIX_MATCH

UNUSED = "accepted and without effect"


@plugin("pd-profile-handler")
@dataclass(slots=True)
class PdProfileHandler(ProfileHandler):
    """Deprecated: a disagg-profile-handler of two stages, decode first."""

    name: InstanceName
    known: ProfileNames
    available: Deciders
    decode_profile: str = param("decode", "profile of the pods that answer")
    prefill_profile: str = param("prefill", "profile of the pods that compute prompts for others")
    decider_plugin_name: str = param("prefix-based-pd-decider", "name of the decider that says when")
    prefix_match_info_producer_name: str = param("", "a producer of the prefix match that must be there")
    prefix_plugin_type: str = param("", UNUSED)
    prefix_plugin_name: str = param("", UNUSED)
    primary_port: int = param(0, UNUSED + ": each rank is reached at its own port", at_least=0, at_most=65535)
    _stages: Stages = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        profiles = StageProfiles(decode=self.decode_profile, prefill=self.prefill_profile)
        deciders = StageDeciders(prefill=self.decider_plugin_name)
        self._stages = stages(self.name, profiles, deciders, self.known, self.available, "decode-first")

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (PEER.of(self.name),)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        name = self.prefix_match_info_producer_name
        return (PREFIX_MATCH.of(name),) if name else ()

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]:
        return self._stages.plan(request)
