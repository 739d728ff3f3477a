"""Connectors: how the KV cache of a prompt gets from its prefill pod to its decode pod."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random


class Split(NamedTuple):
    """Fields for the two requests. `decode` is None before the prefill pod has responded; `request_id` replaces the
    request's own where the engines read addresses from it."""

    prefill: dict[str, Any]
    decode: dict[str, Any] | None
    request_id: str | None = None


class Connector(Protocol):
    """One connector per kind of engine configuration; stateless. A new one is a file in `connectors`, with the
    same name but for the dashes."""

    name: ClassVar[str]
    at_once: ClassVar[bool] = False
    """Whether both pods get their requests at the same time, and find each other."""
    needs_pair: ClassVar[bool] = False
    """Whether pods with a role serve only split requests, and a computed prompt is for one decode pod."""
    generates_first_token: ClassVar[bool] = False
    """Whether the token of the prefill pod is the first one of the response, so that it needs all fields about the
    response."""

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        """Return what both requests need before the first one is sent."""

    def hand_over(self, response: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields for the decode request from the prefill pod's response, by default none; None if that pod
        kept nothing, so that the decode pod computes the prompt. Not called if both requests are sent at once."""
        return {}


def only_once(request_id: str, random: Random) -> str:
    """Return a name for a transfer that no other attempt has: a client may send one id twice, and a pod that failed
    ends its transfer when another one fetches already. Engines read what follows the last colon as a port."""
    return f"{int(random.random() * 2**53):014x}-{request_id.replace(':', '.')}"


def host_of(endpoint: Endpoint) -> str:
    """Return the host of a pod's transfers: that of its URL, or of its label."""
    return endpoint.labels.get("kvlane/transfer-host") or urlsplit(endpoint.url).hostname or ""


def port_of(endpoint: Endpoint, default: int) -> int:
    """Return the port of the pod's bootstrap server, from the label kvlane/bootstrap-port."""
    labelled = endpoint.labels.get("kvlane/bootstrap-port", "")
    return int(labelled) if labelled.isdigit() else default
