"""The `listen`, `admin` and `security` sections, and TLS towards clients and pods."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from proxy.auth.settings import AuthSettings
from proxy.core.endpoint import Endpoint, PodTls
from proxy.core.errors import Problem, cause
from proxy.core.files import WatchedFiles
from proxy.core.params import Duration, Size, join, param
from proxy.http.paths import faults_of_extension

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 10.0
"""Seconds for the TLS handshake. Until then a client does not count as a connection."""

_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class ReloadedContext:
    """A TLS context that is reloaded when its files change. Checking the files takes a few microseconds beside the
    millisecond of a handshake, so each handshake does it. Unusable files, such as half-written ones, leave the current
    context."""

    def __init__(self, files: Sequence[str | None], make: Callable[[], ssl.SSLContext]) -> None:
        """Raise OSError or ValueError if they are unusable now."""
        self._files = WatchedFiles([file for file in files if file], waits_for_writer=False)
        self._make = make
        self._context = self._files.read(make)

    def context(self) -> ssl.SSLContext:
        try:
            context = self._files.read_if_changed(self._make)
        except (OSError, ValueError) as error:
            log.error("failed to reload the TLS files %s; keeping the previous ones: %s", self._names, error)
            return self._context
        if context is not None:
            self._context = context
            log.info("reloaded the TLS files %s", self._names)
        return self._context

    @property
    def _names(self) -> str:
        return ", ".join(map(str, self._files.paths))


def server_context(settings: ServerTls, path: str, protocols: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
    """Return the context of a listener, which uses the current files in every handshake. Raise OSError that names the
    unusable file and its setting below `path`."""
    make = partial(_server, settings, protocols)
    try:
        followed = ReloadedContext((settings.cert, settings.key, settings.client_ca), make)
    except (OSError, ValueError) as error:
        raise OSError(str(tls_fault(settings, path) or Problem(path, str(error)))) from error

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


def tls_fault(settings: ServerTls | PodTls, path: str) -> Problem | None:
    """Return why a connection cannot use the files of the settings at `path`; None if it can."""
    authority, name = (settings.client_ca, "clientCa") if isinstance(settings, ServerTls) else (settings.ca, "ca")
    cert, key = settings.cert, settings.key
    if fault := _no_certificates(cert, join(path, "cert")) or _no_certificates(authority, join(path, name)):
        return fault
    if cert is None:
        return None
    where, file = (join(path, "cert"), cert) if key is None else (join(path, "key"), key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        if not error.reason:
            return Problem(where, f"{file} holds no private key in PEM format")
        return Problem(where, f"{file} cannot be used with the certificate in {cert}: {_words_of(error)}")
    except (OSError, ValueError) as error:
        return Problem(where, f"{file} cannot be read: {cause(error)}")
    return None


def _no_certificates(file: str | None, path: str) -> Problem | None:
    if file is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        return Problem(path, f"{file} holds no certificate in PEM format: {_words_of(error)}")
    except (OSError, ValueError) as error:
        return Problem(path, f"{file} cannot be read: {cause(error)}")
    return None


def _words_of(error: ssl.SSLError) -> str:
    return str(error.reason or error).replace("_", " ").lower()


def no_password() -> str:
    """Fail instead of letting OpenSSL prompt on the terminal."""
    raise ValueError("the key is encrypted; leave it unencrypted, in a file that only kvlane may read")


class PodTlsContexts:
    """TLS towards pods. Settings are read from the fleet for each connection, because pods change."""

    def __init__(
        self,
        default: PodTls | None = None,
        endpoints: Callable[[], Iterable[Endpoint]] = tuple,
        pools: Mapping[str, PodTls] = MappingProxyType({}),
    ) -> None:
        """`default` applies to pods without settings of their own, in pools that are not among `pools`."""
        self.default = default or PodTls()
        self.pools = pools
        """Changes apply to new connections."""
        self._endpoints = endpoints
        self._made: dict[PodTls, ReloadedContext] = {}

    def at(self, host: str, port: int) -> tuple[ssl.SSLContext, str]:
        """Return the context for a pod and the required name of its certificate. A port without a pod is the metrics
        port of the pod at this host. Raise OSError or ValueError for unusable files."""
        settings = self.default
        for endpoint in self._endpoints():
            if (own := self._own(endpoint)) is not None:
                its_host, its_port = _where(endpoint.url)
                if its_host == host:
                    settings = own
                    if its_port == port:
                        break
        return self._context(settings), settings.server_name or host

    def of(self, endpoint: Endpoint) -> tuple[ssl.SSLContext, str | None]:
        """As `at`, for a URL; the name defaults to its host."""
        settings = self._own(endpoint) or self.default
        return self._context(settings), settings.server_name

    def _own(self, endpoint: Endpoint) -> PodTls | None:
        return endpoint.tls or self.pools.get(endpoint.pool)

    def _context(self, settings: PodTls) -> ssl.SSLContext:
        followed = self._made.get(settings)
        if followed is None:
            files = (settings.ca, settings.cert, settings.key)
            try:
                followed = self._made[settings] = ReloadedContext(files, lambda: _client(settings))
            except (OSError, ValueError) as error:
                raise OSError(str(tls_fault(settings, "tls") or error)) from error
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
def _where(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


MIB = 1024 * 1024
SEND_TIMEOUT = Duration(60.0)

_HOST_NAME = re.compile(r"[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*\.?(:[0-9]+)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS of a listening port. Files are PEM and are read again when they change."""

    cert: str = param(doc="file of the certificate, followed by its intermediate certificates")
    key: str | None = param(None, "file of the private key; default: the key in the certificate file")
    client_ca: str | None = param(
        None,
        "file of the certificate authorities that must have signed the client's certificate; null: no client "
        "certificate is required",
    )
    min_version: Literal["1.2", "1.3"] = param("1.2", "oldest accepted TLS version")


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """The data port."""

    host: str = param("0.0.0.0", "address of the data port")
    port: int = param(8000, "port of the data port; 0: any free port", at_least=0, at_most=65535)
    max_body: Size = param(Size(64 * MIB), "largest request body; a larger one is refused with 413", at_least=1)
    retained_bodies: Size = param(
        Size(512 * MIB),
        "memory for request bodies, request heads and pipelined requests of all clients; beyond it kvlane "
        "stops reading until some is free; a request that cannot get memory gets 429 `rejected-saturated`",
        at_least=1,
    )
    kept_upload: Size = param(
        Size(64 * MIB),
        "largest form that is read completely, so that it can be retried on another pod; a larger one is "
        "streamed to one pod",
        at_least=1,
    )
    head_timeout: Duration = param(
        Duration(30.0),
        "time from the first to the last byte of a request head; then the request is refused with 408",
        more_than=0,
    )
    body_timeout: Duration = param(
        Duration(60.0), "time between two pieces of a request body; then the request is refused with 408", more_than=0
    )
    min_body_rate: Size = param(
        Size(1024),
        "bytes per second that a client must send of a body that takes longer than bodyTimeout, else 408; 0: "
        "no minimum",
        at_least=0,
    )
    send_timeout: Duration = param(
        SEND_TIMEOUT,
        "time for which a client may read nothing of its response; then its connection is reset",
        more_than=0,
    )
    max_connections: int = param(
        20_000,
        "largest number of client connections of one process; further ones are closed at once",
        at_least=1,
        at_most=10_000_000,
    )
    tls: ServerTls | None = param(None, "serve HTTPS instead of HTTP")
    keep_alive: Duration = param(
        Duration(3630.0),
        "time that a connection stays open without a request; set it above that of a proxy in front of kvlane",
        more_than=0,
    )

    def __post_init__(self) -> None:
        check_host(self.host, "listen.port")


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """The admin port."""

    host: str = param("127.0.0.1", "address of the admin port")
    port: int = param(9190, "port of the admin port; 0: any free port", at_least=0, at_most=65535)
    api_key: str | None = param(None, "bearer token that is required for everything but probes and /metrics")
    hosts: tuple[str, ...] = param(
        (),
        "further accepted host names, such as the name of a Kubernetes or Compose service; IP addresses, "
        "localhost and admin.host are always accepted. With apiKey set, only /metrics checks the host name",
    )
    tls: ServerTls | None = param(None, "serve HTTPS instead of HTTP")

    def __post_init__(self) -> None:
        """Raise ValueError for an empty key, which would open the port, and for invalid hosts."""
        check_host(self.host, "admin.port")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("apiKey: is empty; set it, or leave it out to go without one")
        for name in self.hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"hosts: {name!r} is not a host name; write it as in a URL, without scheme and path")

    @property
    def host_names(self) -> frozenset[str]:
        """The accepted host names beside `localhost` and IP addresses, normalised."""
        return frozenset(map(host_name, (self.host, *self.hosts)))


def check_host(host: str, port: str) -> None:
    """Raise ValueError for a URL and for a host with a port. `port` is the setting of the port."""
    if "/" in host or "[" in host or host.count(":") == 1:
        raise ValueError(f"host: {host!r} is not a host; write only a name or an address, and the port as {port}")


def host_name(host: str) -> str:
    """Return the name or address in a `Host` header, in lower case, without port, brackets and trailing dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") > 1:  # an IPv6 address of the settings, which has no brackets
        return host.lower()
    return host.partition(":")[0].removesuffix(".").lower()


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """Cross-origin requests from browsers; off while `origins` is empty."""

    origins: tuple[str, ...] = param(
        (), "origins of web pages that may send requests, such as https://host; `*` allows every origin"
    )

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid origin."""
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"origins: {origin!r} is no origin; write https://host, with the port if it is another"
                )


@dataclass(frozen=True, slots=True)
class SecuritySettings(AuthSettings):
    """Authentication, authorisation and limits. Without keys and tokens, requests need no authentication."""

    relay_paths: tuple[str, ...] = param((), "further paths to relay to pods: exact, or `/prefix/*`")

    expose_endpoint: bool = param(True, "name the pod in x-kvlane-endpoint, and a substituted model in x-kvlane-model")

    client_ranks: bool = param(
        False, "let clients choose a data-parallel rank with X-data-parallel-rank; otherwise kvlane ignores the header"
    )

    cors: CorsSettings = field(default_factory=CorsSettings)

    def faults(self) -> Iterator[str]:
        yield from AuthSettings.faults(self)
        for index, path in enumerate(self.relay_paths):
            yield from (f"relayPaths[{index}]: {fault}" for fault in faults_of_extension(path))
