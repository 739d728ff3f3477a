"""The deprecated name of disagg-profile-handler, with the earlier names of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.params import param
from proxy.core.plugin import plugin
from proxy.core.ports import Deciders, InstanceName, ProfileNames
from proxy.core.request import DataKey
from proxy.plugins.stages import StageDeciders, StagedHandler, StageProfiles, stages
from proxy.prefix.match import PrefixMatch, requires_prefix_match

UNUSED = "accepted and without effect"


@plugin("pd-profile-handler")
@dataclass
class PdProfileHandler(StagedHandler):
    """Deprecated: a disagg-profile-handler of two stages, decode first."""

    name: InstanceName
    known: ProfileNames
    available: Deciders
    decode_profile: str = param("decode", "profile of the decode pods")
    prefill_profile: str = param("prefill", "profile of the prefill pods")
    decider_plugin_name: str = param("prefix-based-pd-decider", "name of the decider")
    match: DataKey[PrefixMatch] = requires_prefix_match()
    prefix_plugin_type: str = param("", UNUSED)
    prefix_plugin_name: str = param("", UNUSED)
    primary_port: int = param(0, UNUSED + ": each rank is reached at its own port", at_least=0, at_most=65535)

    def __post_init__(self) -> None:
        profiles = StageProfiles(decode=self.decode_profile, prefill=self.prefill_profile)
        deciders = StageDeciders(prefill=self.decider_plugin_name)
        self._stages = stages(self.name, profiles, deciders, self.known, self.available, "decode-first")
