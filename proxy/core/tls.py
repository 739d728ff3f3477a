"""How a pod is spoken to over TLS."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.params import param


@dataclass(frozen=True, slots=True)
class PodTls:
    """For `https` URLs. Files are PEM, and read again when they change; without a `ca` the system's are trusted."""

    ca: str | None = param(None, "file of the certificates that a pod's may be signed by; the system's unless given")
    cert: str | None = param(None, "file of the certificate that is shown to the pod")
    key: str | None = param(None, "file of its key, unless that is in the same file")
    server_name: str | None = param(None, "name in the pod's certificate; the host of its URL unless given")
    insecure_skip_verify: bool = param(False, "take any certificate: whoever is in between may read and change all")

    def __post_init__(self) -> None:
        """Raises ValueError for what contradicts itself."""
        if self.key and not self.cert:
            raise ValueError("key is of no use without cert")
        if self.insecure_skip_verify and self.ca:
            raise ValueError("insecureSkipVerify trusts everybody, so ca has no effect; take one of them out")
