"""Run the only profile."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from proxy.core.decision import Decision, ProfileResult
from proxy.core.plugin import ProfileHandler, plugin
from proxy.core.ports import ProfileNames
from proxy.core.request import InferenceRequest


@plugin("single-profile-handler")
@dataclass(frozen=True, slots=True)
class SingleProfileHandler(ProfileHandler):
    """Runs the only profile; several profiles are an error. Shadow profiles do not count."""

    profiles: ProfileNames

    def __post_init__(self) -> None:
        if len(self.profiles) > 1:
            raise ValueError(f"runs exactly one profile, and there are {', '.join(self.profiles)}")

    def only_profile(self) -> str:
        return self.profiles[0]

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]:
        result = yield self.profiles[0]
        return Decision.from_result(result)
