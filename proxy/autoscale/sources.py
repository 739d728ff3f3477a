"""How a source is written that is a query, and where queries are asked."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.core.params import param
from proxy.core.units import Duration

PROMQL = "promql:"
"""What such a source begins with."""


@dataclass(frozen=True, slots=True)
class PrometheusSettings:
    """Where queries of metrics and signals are asked."""

    url: str = param(doc="of Prometheus, or of what answers as it does; with the path before /api/v1, if there is one")
    timeout: Duration = param(Duration(5.0), "for one answer", more_than=0)
    token: str | None = param(None, "bearer token")
    token_file: str = param("", "file of a bearer token, read anew for each query")
    ca_file: str = param("", "file of the certificates that the server's may be signed by; the system's unless given")

    def __post_init__(self) -> None:
        """Raises ValueError."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {self.url!r} is no URL of a Prometheus; write http://host:9090")
        if self.token is not None and self.token_file:
            raise ValueError("token and tokenFile exclude each other")
