"""Select the profile by a request header."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.decision import Decision, ProfileResult
from proxy.core.errors import BadRequest, NotCached
from proxy.core.params import param
from proxy.core.plugin import ProfileHandler, plugin
from proxy.core.ports import ProfileNames
from proxy.core.request import DataKey, InferenceRequest
from proxy.prefix.match import PREFIX_MATCH

HEADER, DEFAULT_PROFILE = "EPP-Profile", "decode"


@plugin("header-profile-handler")
@dataclass(frozen=True, slots=True)
class HeaderProfileHandler(ProfileHandler):
    """Runs the profile that the header names, case-sensitively; without the header, the default profile. A single
    profile always runs. An unknown name is a client error (400).

    With `Prefer: if-available`, which llm-d's coordinator sends, the client gets 412 unless the chosen pod has cached
    the start of the prompt."""

    uses: ClassVar[tuple[DataKey[Any], ...]] = (PREFIX_MATCH,)
    profiles: ProfileNames
    header_name: str = param(HEADER, f"request header, in upper or lower case; empty: {HEADER}")
    default_profile: str = param(DEFAULT_PROFILE, f"profile of requests without the header; empty: {DEFAULT_PROFILE}")

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]:
        result = yield self._chosen(request)
        decision = Decision.from_result(result)
        if wants_cached(request.headers.get("prefer", "")):
            match = request.state.read(PREFIX_MATCH)
            if match is None or not match.blocks_on(decision.target):
                raise NotCached(
                    "The pod for this request has not cached its prompt, as `Prefer: if-available` requires."
                )
        return decision

    def _chosen(self, request: InferenceRequest) -> str:
        if len(self.profiles) == 1:
            return self.profiles[0]
        header = self.header_name.strip() or HEADER
        name = request.headers.get(header.lower(), "").strip() or self.default_profile.strip() or DEFAULT_PROFILE
        if name not in self.profiles:
            known = ", ".join(self.profiles)
            raise BadRequest(f"'{name}' is no scheduling profile; {header} can be one of {known}.")
        return name


def wants_cached(prefer: str) -> bool:
    """Return whether the header, a list of preferences with parameters, contains `if-available`."""
    return (
        any(each.partition(";")[0].strip().lower() == "if-available" for each in prefer.split(",")) if prefer else False
    )
