"""Read the session id of a coding agent's request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import DataKey, InferenceRequest

AGENT_IDENTITY: DataKey[str] = DataKey("agent-identity", value_type=str)
SESSION_HEADERS = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
"""Headers of Claude Code, OpenCode and Codex; the last one is from earlier versions of Codex."""


@plugin("agent-identity")
@dataclass(frozen=True, slots=True)
class AgentIdentity(DataProducer):
    """Reads the session id from the headers that coding agents send, the first that is not empty: additional headers,
    then x-claude-code-session-id, x-session-affinity, session-id and session_id. Session affinity uses it with the
    source `attribute: agent-identity`; fair queuing uses it as the tenant of requests without one."""

    waits: ClassVar[bool] = False

    name: InstanceName
    additional_session_headers: tuple[str, ...] = param(
        (), "further headers, which take precedence; in upper or lower case"
    )

    @property
    def headers(self) -> tuple[str, ...]:
        return (*(header.lower() for header in self.additional_session_headers), *SESSION_HEADERS)

    @property
    def provides(self) -> tuple[DataKey[str], ...]:
        return (AGENT_IDENTITY.of(self.name),)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        session = next((value for name in self.headers if (value := request.headers.get(name, "").strip())), "")
        if session:
            request.state.write(self.provides[0], session)
