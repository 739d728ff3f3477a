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
class Access:
    """Without a `server`, that of the cluster which the proxy runs in, with the service account of its pod."""

    server: str = param("", "URL of the API server; that of the cluster the proxy runs in unless given")
    namespace: str = param("", "where the objects are; that of the proxy unless given")
    token_file: str = param("", "file of a bearer token, read anew for each connection; the service account's in a pod")
    ca_file: str = param("", "file of the certificates that the server's may be signed by; the cluster's in a pod")

    def __post_init__(self) -> None:
        """Raises ValueError for a server that is none."""
        parts = urlsplit(self.server)
        if self.server and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"server: {self.server!r} is no URL of an API server; write https://host:port")

    @property
    def url(self) -> str:
        if self.server:
            return self.server.rstrip("/")
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def own_namespace(self) -> str:
        """Raises OSError where it is not given, nor a pod's."""
        return self.namespace or (SERVICE_ACCOUNT / "namespace").read_text().strip()

    def headers(self) -> dict[str, str]:
        """The token's file is replaced within the hour. Raises OSError."""
        path = self.token_file or ("" if self.server else SERVICE_ACCOUNT / "token")
        bearer = {"authorization": f"Bearer {Path(path).read_text().strip()}"} if path else {}
        return {"accept": "application/json", **bearer}

    def trust(self) -> ssl.SSLContext | bool:
        """Raises OSError or ValueError for a file that cannot be used."""
        if not self.url.startswith("https:"):
            return True
        return ssl.create_default_context(
            cafile=self.ca_file or (None if self.server else str(SERVICE_ACCOUNT / "ca.crt"))
        )
