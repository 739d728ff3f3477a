"""TLS towards pods: which certificates are trusted and shown, pod by pod."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.tls import PodTls
from proxy.http.tls import Followed, no_password

Where = tuple[str | None, int]


class Trust:
    """What is known of pods is read off the fleet whenever a connection is made: pods move and change."""

    def __init__(
        self,
        default: PodTls | None = None,
        endpoints: Callable[[], Iterable[Endpoint]] = tuple,
        pools: Mapping[str, PodTls] = MappingProxyType({}),
    ) -> None:
        """`default` is for pods that say nothing of their own, in pools that are not among `pools`."""
        self.default = default or PodTls()
        self.pools = pools
        """Where these change, new connections follow."""
        self._endpoints = endpoints
        self._made: dict[PodTls, Followed] = {}

    def at(self, host: str, port: int) -> tuple[ssl.SSLContext, str]:
        """The context to speak to a pod with, and the name that its certificate must have. A port where no pod serves
        is that of the metrics of the pod at this host. Raises OSError or ValueError for files that cannot be used."""
        settings = self._tls_at(host, port)
        return self._context(settings), settings.server_name or host

    def of(self, endpoint: Endpoint) -> tuple[ssl.SSLContext, str | None]:
        """As `at`; without a name it is that of the URL."""
        settings = self._own(endpoint) or self.default
        return self._context(settings), settings.server_name

    def _tls_at(self, host: str, port: int) -> PodTls:
        beside = None
        for endpoint in self._endpoints():
            if (own := self._own(endpoint)) is not None:
                its_host, its_port = _where(endpoint.url)
                if its_host == host and its_port == port:
                    return own
                if its_host == host:
                    beside = own
        return beside or self.default

    def _own(self, endpoint: Endpoint) -> PodTls | None:
        return endpoint.tls or self.pools.get(endpoint.pool)

    def _context(self, settings: PodTls) -> ssl.SSLContext:
        followed = self._made.get(settings)
        if followed is None:
            files = (settings.ca, settings.cert, settings.key)
            followed = self._made[settings] = Followed(files, lambda: _client(settings))
        return followed.context()


def _client(settings: PodTls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.insecure_skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if settings.cert:
        context.load_cert_chain(settings.cert, settings.key, no_password)
    return context


@lru_cache(maxsize=4096)
def _where(url: str) -> Where:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
