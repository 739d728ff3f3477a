"""Select the profile by a request header."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from proxy.core.decision import Decision, ProfileResult
from proxy.core.errors import BadRequest
from proxy.core.params import param
from proxy.core.plugin import ProfileHandler, plugin
from proxy.core.ports import ProfileNames
from proxy.core.request import InferenceRequest


@plugin("header-profile-handler")
@dataclass(frozen=True, slots=True)
class HeaderProfileHandler(ProfileHandler):
    """Runs the profile that the header names, case-sensitively; without the header, the default profile. A single
    profile always runs. An unknown name is a client error (400)."""

    profiles: ProfileNames
    header_name: str = param("EPP-Profile", "request header, in upper or lower case")
    default_profile: str = param("decode", "profile of requests without the header")

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]:
        result = yield self._chosen(request)
        return Decision.from_result(result)

    def _chosen(self, request: InferenceRequest) -> str:
        if len(self.profiles) == 1:
            return self.profiles[0]
        name = request.headers.get(self.header_name.lower(), "").strip() or self.default_profile
        if name not in self.profiles:
            known = ", ".join(self.profiles)
            raise BadRequest(f"'{name}' is no scheduling profile; {self.header_name} can be one of {known}.")
        return name
