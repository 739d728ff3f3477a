"""The `extproc` section."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.params import param
from proxy.http.settings import ServerTls, check_host


@dataclass(frozen=True, slots=True)
class ExtProcSettings:
    """The gRPC port for gateways such as Envoy, which speaks the Endpoint Picker Protocol over ext_proc; needs the
    extra kvlane[extproc]."""

    host: str = param("0.0.0.0", "address of the port for gateways")
    port: int | None = param(
        None, "gRPC port for gateways, usually 9002; null: the port is closed", at_least=0, at_most=65535
    )
    tls: ServerTls | None = param(None, "serve TLS on this port")
    fallbacks: int = param(
        0,
        "number of fallback pods to name after the first, for gateways that retry on them; clusters of type "
        "ORIGINAL_DST support 0 only",
        at_least=0,
        at_most=16,
    )

    def __post_init__(self) -> None:
        check_host(self.host, "extproc.port")

    @property
    def is_on(self) -> bool:
        return self.port is not None
