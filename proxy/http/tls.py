"""TLS: contexts towards clients and pods, which follow their files."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.tls import PodTls
from proxy.core.watched_files import WatchedFiles
from proxy.http.settings import ServerTls

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds that a client has to get through its handshake. Until then it is not counted as a connection."""

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class Followed:
    """A context made of files, and made again when they have changed.

    Looking whether they have is a few microseconds, next to the millisecond of a handshake: so it is done at each, and
    nothing has to watch. Files that cannot be used, half of them written perhaps, leave the context that there is.
    """

    def __init__(self, files: Sequence[str | None], make: Callable[[], ssl.SSLContext]) -> None:
        """Raises OSError or ValueError if they cannot be used now."""
        self._files = WatchedFiles([file for file in files if file], settles=False)
        self._make = make
        self._context = self._files.read(make)

    def context(self) -> ssl.SSLContext:
        try:
            context = self._files.read_if_changed(self._make)
        except (OSError, ValueError) as error:
            log.error("the TLS files %s have changed and cannot be used, the ones before stay: %s", self._names, error)
            return self._context
        if context is not None:
            self._context = context
            log.info("the TLS files %s were read again", self._names)
        return self._context

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._files.paths))


def server_context(settings: ServerTls, protocols: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
    """For listeners, as long as they live: it puts the context of the present files in its place in every handshake.
    Raises OSError that names what cannot be used."""
    make = partial(_server, settings, protocols)
    try:
        followed = Followed((settings.cert, settings.key, settings.client_ca), make)
    except (OSError, ValueError) as error:
        names = ", ".join(file for file in (settings.cert, settings.key, settings.client_ca) if file)
        wanted = "each must be a readable PEM file, the key that of the certificate"
        raise OSError(f"the TLS files {names} cannot be used: {error}; {wanted}") from error

    def present(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        connection.context = followed.context()

    context = make()
    context.sni_callback = present
    return context


def _server(settings: ServerTls, protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[settings.min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(list(protocols))
    context.load_cert_chain(settings.cert, settings.key, no_password)
    if settings.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(settings.client_ca)
        context.options |= ssl.OP_NO_TICKET  # a resumed session is not verified again, whatever the CA is by then
        context.num_tickets = 0
    return context


def no_password() -> str:
    """OpenSSL would ask the terminal, and wait."""
    raise ValueError("the key is encrypted; leave it unencrypted, in a file that only kvlane may read")


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
