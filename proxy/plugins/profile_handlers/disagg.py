"""Prefill on one pod, decode on another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from proxy.core.params import param
from proxy.core.plugin import plugin
from proxy.core.ports import Deciders, InstanceName, ProfileNames
from proxy.plugins.stages import StageDeciders, StagedHandler, StageProfiles, Stages, stages

OLDER = "older spelling of "


@plugin("disagg-profile-handler")
@dataclass(slots=True)
class DisaggProfileHandler(StagedHandler):
    """Runs the decode profile, which chooses the pod that responds; then, if its decider wants it, the encode profile,
    and the prefill profile in the same way. A stage without another pod than the decode pod is left out; where the
    decode profile finds none, a pod of the prefill profile does all. With `prefill-first` every prompt is computed by a
    pod of the prefill profile, which is chosen first.
    """

    name: InstanceName
    known: ProfileNames
    available: Deciders
    stage_order: Literal["decode-first", "prefill-first"] = param(
        "decode-first", "whose pod is chosen first: then that of the other stage can be near it"
    )
    profiles: StageProfiles = param(StageProfiles(), "the profile of each stage")
    deciders: StageDeciders = param(StageDeciders(), "who says whether a stage runs")
    prefix_match_info_producer_name: str = param("", "a producer of the prefix match that must be there")
    decode_profile: str = param("", OLDER + "profiles.decode")
    prefill_profile: str = param("", OLDER + "profiles.prefill")
    encode_profile: str = param("", OLDER + "profiles.encode")
    prefill_decider_plugin_name: str = param("", OLDER + "deciders.prefill", aliases=("deciderPluginName",))
    encode_decider_plugin_name: str = param("", OLDER + "deciders.encode")
    _stages: Stages = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        profiles, deciders = self._of_older_spellings()
        self._stages = stages(self.name, profiles, deciders, self.known, self.available, self.stage_order)

    def _of_older_spellings(self) -> tuple[StageProfiles, StageDeciders]:
        named = {"decode": self.decode_profile, "prefill": self.prefill_profile, "encode": self.encode_profile}
        deciders = {"prefill": self.prefill_decider_plugin_name, "encode": self.encode_decider_plugin_name}
        if not any((*named.values(), *deciders.values())):
            return self.profiles, self.deciders
        if self.profiles != StageProfiles() or self.deciders != StageDeciders():
            raise ValueError("the older spellings (decodeProfile, deciderPluginName, …) exclude profiles and deciders")
        given = {stage: profile for stage, profile in named.items() if profile}
        return replace(StageProfiles(), **given), StageDeciders(**deciders)
