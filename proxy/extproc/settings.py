"""The `extproc` section."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.params import param
from proxy.http.settings import ServerTls


@dataclass(frozen=True, slots=True)
class ExtProcSettings:
    """The port at which gateways ask which pod a request goes to, by the Endpoint Picker Protocol over ext_proc; needs
    the extra kvlane[extproc]."""

    host: str = param("0.0.0.0", "address of the port for gateways")
    port: int | None = param(None, "gRPC port for gateways, 9002 by custom; null: none", at_least=0, at_most=65535)
    tls: ServerTls | None = param(None, "to speak TLS there")
    fallbacks: int = param(
        0,
        "further pods that are named behind the first, for gateways that go on to them when it fails;"
        " clusters of type ORIGINAL_DST take one only",
        at_least=0,
        at_most=16,
    )

    @property
    def is_on(self) -> bool:
        return self.port is not None
