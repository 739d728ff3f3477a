"""Read the session id of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import DataKey, InferenceRequest

SESSION_ID: DataKey[str] = DataKey("SessionID", value_type=str)


@plugin("session-id-producer")
@dataclass(frozen=True, slots=True)
class SessionIdProducer(DataProducer):
    """Reads the session id from a header or a cookie; default: the header x-session-id."""

    waits: ClassVar[bool] = False

    name: InstanceName
    header_name: str = param("", "request header with the id, in upper or lower case")
    cookie_name: str = param("", "cookie with the id")

    def __post_init__(self) -> None:
        if self.header_name and self.cookie_name:
            raise ValueError("headerName and cookieName exclude each other")

    @property
    def provides(self) -> tuple[DataKey[str], ...]:
        return (SESSION_ID.of(self.name),)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        session = self._session(request)
        if session:
            request.state.write(self.provides[0], session)

    def _session(self, request: InferenceRequest) -> str:
        if self.cookie_name:
            return _cookie(request.headers.get("cookie", ""), self.cookie_name)
        return request.headers.get((self.header_name or "x-session-id").lower(), "").strip()


def _cookie(header: str, name: str) -> str:
    """Return one cookie of a Cookie header. Other cookies may have any content: browsers send values that violate the
    grammar."""
    for pair in header.split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value.strip().strip('"')
    return ""
