"""The address of the API server and the credentials for it."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from proxy.core.params import param

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ApiServer:
    """The API server; by default that of kvlane's own cluster, with the service account of its pod."""

    server: str = param("", "URL of the API server; default: that of the cluster in which kvlane runs")
    namespace: str = param("", "namespace of the objects; default: that of kvlane's own pod")
    token_file: str = param(
        "", "file with a bearer token, read for each connection; default in a pod: the token of the service account"
    )
    ca_file: str = param("", "file of the certificate authorities of the server; default in a pod: that of the cluster")

    def __post_init__(self) -> None:
        parts = urlsplit(self.server)
        if self.server and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"server: {self.server!r} is not a URL of an API server; write https://host:port")

    @property
    def url(self) -> str:
        if self.server:
            return self.server.rstrip("/")
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def own_namespace(self) -> str:
        """Return the namespace. Raise OSError where it is neither configured nor that of a pod."""
        return self.namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()

    def headers(self) -> dict[str, str]:
        """Return the headers with the current token, which is replaced within the hour. Raise OSError."""
        path = self.token_file or ("" if self.server else SERVICE_ACCOUNT / "token")
        bearer = {"authorization": f"Bearer {Path(path).read_text().strip()}"} if path else {}
        return {"accept": "application/json", **bearer}

    def trust(self) -> ssl.SSLContext | bool:
        """Return the TLS context. Raise OSError or ValueError for an unusable file."""
        if not self.url.startswith("https:"):
            return True
        return ssl.create_default_context(
            cafile=self.ca_file or (None if self.server else str(SERVICE_ACCOUNT / "ca.crt"))
        )
