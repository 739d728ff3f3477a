"""Run prefill on one pod and decode on another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from proxy.core.params import param
from proxy.core.plugin import plugin
from proxy.core.ports import Deciders, InstanceName, ProfileNames
from proxy.core.request import DataKey
from proxy.plugins.stages import StageDeciders, StagedHandler, StageProfiles, stages
from proxy.prefix.match import PrefixMatch, requires_prefix_match

OLDER = "older spelling of "


@plugin("disagg-profile-handler")
@dataclass
class DisaggProfileHandler(StagedHandler):
    """Runs the decode profile, which picks the pod that responds; then the encode profile and the prefill profile, each
    if its decider requires it. A stage is left out if only the decode pod could run it. If the decode profile finds
    no pod, a pod of the prefill profile serves the whole request. With `prefill-first` every prompt is computed by a
    pod of the prefill profile, which is picked first."""

    name: InstanceName
    known: ProfileNames
    available: Deciders
    stage_order: Literal["decode-first", "prefill-first"] = param(
        "decode-first", "stage whose pod is picked first; the pod of the other stage can then be close to it"
    )
    profiles: StageProfiles = param(StageProfiles(), "the profile of each stage")
    deciders: StageDeciders = param(StageDeciders(), "decider of each stage")
    match: DataKey[PrefixMatch] = requires_prefix_match()
    decode_profile: str = param("", OLDER + "profiles.decode")
    prefill_profile: str = param("", OLDER + "profiles.prefill")
    encode_profile: str = param("", OLDER + "profiles.encode")
    prefill_decider_plugin_name: str = param("", OLDER + "deciders.prefill", aliases=("deciderPluginName",))
    encode_decider_plugin_name: str = param("", OLDER + "deciders.encode")

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
