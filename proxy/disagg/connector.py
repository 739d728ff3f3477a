"""What a connector is: how the KV cache of a prompt gets from the pod that computes it to the one that answers."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random


class Split(NamedTuple):
    """What is added to the two requests. `decode` is None until the prefill pod has answered; `request_id` replaces the
    request's own where the connector reads addresses from it."""

    prefill: dict[str, Any]
    decode: dict[str, Any] | None
    request_id: str | None = None


class Connector(Protocol):
    """One per kind of engine configuration; stateless. A new one is a file in `connectors`."""

    name: ClassVar[str]
    at_once: ClassVar[bool] = False
    """Both pods get their requests at the same time, and find each other."""
    needs_pair: ClassVar[bool] = False
    """A pod with a role serves no request that was not split, and a prompt that was computed is for one decode pod."""
    begins_answer: ClassVar[bool] = False
    """The one token that the prefill pod makes is the first of the answer, so it is told all that the answer has to
    keep to. Others make it for nobody."""

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        """Before anything is sent."""

    def hand_over(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """What the prefill pod's answer, a JSON object, has for the decode pod; None: nothing was kept, and the decode
        pod will compute the prompt again. Not asked if both are sent at once."""


def only_once(request_id: str, random: Random) -> str:
    """A name for what is handed over, which no other attempt has: a client may send one id twice, and a pod that failed
    lets go of its transfer when another one fetches already. Engines take what follows a colon for a port, and find
    their addresses by the last one."""
    return f"{int(random.random() * 2**53):014x}-{request_id.replace(':', '.')}"


def host_of(endpoint: Endpoint) -> str:
    """Where a pod's transfers are reached; a label says so if it is another host than its URL's."""
    return endpoint.labels.get("kvlane/transfer-host") or urlsplit(endpoint.url).hostname or ""


def port_of(endpoint: Endpoint, default: int) -> int:
    """Of its bootstrap server, as the label kvlane/bootstrap-port has it."""
    labelled = endpoint.labels.get("kvlane/bootstrap-port", "")
    return int(labelled) if labelled.isdigit() else default
