"""Authentication: API keys of the configuration and of a file, and tokens of an issuer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy import yaml_source
from proxy.auth.settings import ApiKey, AuthSettings, Jwt, Limits, Scope, check_keys
from proxy.core import params
from proxy.core.errors import (
    ConfigError,
    Forbidden,
    IssuerUnreachable,
    Problem,
    Unauthorized,
    UnknownModel,
    without_extra,
)
from proxy.core.files import WatchedFiles
from proxy.core.ports import IDENTITY, Clock, Identity, Resolver, allows
from proxy.core.request import InferenceRequest, changed
from proxy.core.state import Draft
from proxy.core.tasks import Tasks
from proxy.openai.events import with_usage

if TYPE_CHECKING:
    from proxy.auth.jwt_tokens import JwtVerifier  # needs an extra, so it is imported late

log = logging.getLogger(__name__)


Fetch = Callable[[str], Awaitable[tuple[int, bytes]]]
"""URL -> status and body. Raises `outbound.FAILURES`."""


class Authenticator:
    """Checks the credentials of a request. Inside `async with` it follows changes of the key file."""

    def __init__(
        self, access: AuthSettings, clock: Clock, environ: Mapping[str, str], tokens: JwtVerifier | None = None
    ) -> None:
        self._access = access
        self._clock = clock
        self._tasks = Tasks()
        self._file = KeyFile(access.api_keys_file, environ) if access.api_keys_file is not None else None
        self.tokens = tokens
        self.limits: dict[str, Limits] = {}
        """Limits by the name that identities and tenants refer to; changes with the key file."""
        self._keys = self._known(self._file.read() if self._file is not None else ())

    async def __aenter__(self) -> Authenticator:
        if self._file is not None:
            self._tasks.keep(partial(self._file.watch, self._replace), "key-file")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()

    @property
    def has_limits(self) -> bool:
        """Whether any key or tenant has limits; a key file may bring some later."""
        return bool(self.limits) or self._file is not None

    @property
    def tenants(self) -> dict[str, str]:
        """Return the name of the limits of each tenant."""
        return {name: _name_of(f"tenants.{name}", tenant.limits) for name, tenant in self._access.tenants.items()}

    def find(self, headers: Mapping[str, str], scope: Scope = "inference") -> Identity | None:
        """Return the identity, or None if the issuer's keys must be fetched first. Raise Unauthorized, Forbidden for a
        key without this scope, or IssuerUnreachable."""
        secret = presented_secret(headers)
        if secret is None:
            scheme = headers.get("authorization", "").partition(" ")[0].lower()
            raise Unauthorized(NO_KEY if scheme in ("", "bearer") else NO_SCHEME)
        identity = self._keys.find(secret, scope)
        if identity is not None:
            return identity
        if self.tokens is None or secret.count(".") != 2:
            raise Unauthorized("This API key is not known here.")
        return self.tokens.find(secret, scope)

    async def authenticate(self, headers: Mapping[str, str], scope: Scope = "inference") -> Identity:
        """Return the identity, after fetching the issuer's keys if necessary. Raise the same errors as `find`."""
        identity = self.find(headers, scope)
        tokens = self.tokens
        if identity is None and tokens is not None:
            await tokens.keys.refresh()
            identity = self.find(headers, scope)
        if identity is None:
            raise IssuerUnreachable if tokens is None else tokens.unknown_key()
        return identity

    def _replace(self, keys: Sequence[ApiKey]) -> None:
        self._keys = self._known(keys)

    def _known(self, further: Sequence[ApiKey]) -> Keys:
        """Return all keys. Raise ConfigError before anything changes."""
        keys = (*self._access.api_keys, *further)
        try:
            check_keys(keys, self._access.limits)
            known = Keys(keys, self._clock)
        except ValueError as error:
            if self._file is None:
                raise ConfigError([Problem("security", str(error))]) from None
            raise ConfigError([Problem(str(self._file.path), str(error))]).in_file_of(FILE) from None
        self.limits.clear()
        named = {_name_of("", name): limits for name, limits in self._access.limits.items()}
        self.limits.update({**named, **_limits_of_their_own(self._access), **known.limits})
        return known


def authenticator_of(
    access: AuthSettings, clock: Clock, environ: Mapping[str, str], fetch: Fetch, draft: Draft
) -> Authenticator | None:
    """Return the authenticator of a configuration, or None where it has no credentials. `fetch` gets an issuer's keys;
    keys of the same issuer that are in use stay. Raise ConfigError."""
    if not access.asks:
        return None
    tokens = None if access.jwt is None else _tokens(access.jwt, fetch, clock, draft)
    return draft.get("authenticator", lambda: Authenticator(access, clock, environ, tokens), access)


def _tokens(settings: Jwt, fetch: Fetch, clock: Clock, draft: Draft) -> JwtVerifier:
    try:
        from proxy.auth.jwt_tokens import REFRESH, IssuerKeys, JwtVerifier
    except ImportError:
        raise without_extra("security.jwt", "jwt") from None
    issuer = (settings.issuer, settings.jwks)
    keys = draft.get("web-keys", lambda: IssuerKeys(settings.jwks, REFRESH, fetch, clock), issuer)
    return JwtVerifier(settings, _name_of("jwt", settings.limits), keys, clock)


def _limits_of_their_own(access: AuthSettings) -> dict[str, Limits]:
    others = [(f"tenants.{name}", tenant.limits) for name, tenant in access.tenants.items()]
    others += [("jwt", access.jwt.limits)] if access.jwt is not None else []
    return {name: limits for name, limits in others if isinstance(limits, Limits)}


def _name_of(own: str, limits: Limits | str | None) -> str:
    """Return the name that identities and tenants refer to. It has a prefix if the limits are named in
    `security.limits`: one of those may be named `jwt`."""
    if isinstance(limits, Limits):
        return own
    return f"limits.{limits}" if limits else ""


PREFIX = "kvl_"
"""By which scanners of repositories can find keys that were left there."""


class Keys:
    """All API keys; replaced as a whole. Only the digests of secrets are kept: how long it takes to
    look one up reveals nothing of a key, because a client cannot choose the digest of what it sends."""

    def __init__(self, keys: Sequence[ApiKey], clock: Clock) -> None:
        self._clock = clock
        self._known: dict[bytes, tuple[ApiKey, Identity]] = {}
        self.limits: dict[str, Limits] = {}
        """Limits that keys define themselves, by the name that their identities refer to."""
        for key in keys:
            digest = bytes.fromhex((key.hash or hashed((key.key or "").strip())).partition(":")[2])
            if digest in self._known:
                raise ValueError(f"apiKeys: '{self._known[digest][0].name}' and '{key.name}' are the same key")
            self._known[digest] = key, self._identity(key)

    def find(self, secret: str, scope: Scope) -> Identity | None:
        """Return None for an unknown key. Raise Unauthorized if it has expired, Forbidden if it lacks the scope."""
        found = self._known.get(hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest())
        if found is None:
            return None
        key, identity = found
        if key.expires is not None and self._clock.wall() >= key.expires:
            raise Unauthorized("This API key has expired.")
        if scope not in key.scopes:
            raise Forbidden(f"The key '{key.name}' has no scope '{scope}'.")
        return identity

    def _identity(self, key: ApiKey) -> Identity:
        limits = _name_of(f"apiKeys.{key.name}", key.limits)
        if isinstance(key.limits, Limits):
            self.limits[limits] = key.limits
        return Identity(
            name=key.name,
            tenant=key.tenant or key.name,
            models=frozenset(key.models) or None,
            objectives=frozenset(key.objectives),
            limits=limits,
        )


NO_KEY = "An API key is needed: send `Authorization: Bearer <key>`."
NO_SCHEME = "The Authorization header lacks the scheme Bearer: send `Authorization: Bearer <key>`."


def presented_secret(headers: Mapping[str, str]) -> str | None:
    """Return the secret of a request: where clients of OpenAI, Anthropic and Azure put it."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (bearer := bearer.strip(" \t")):
        return bearer
    return headers.get("x-api-key") or headers.get("api-key")


def new_key() -> str:
    """Return a new key with 256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hashed(secret: str) -> str:
    """Return the hash for a configuration. A key is random, so a slow hash function would add nothing."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


INTERVAL = 1.0
"""Seconds between two looks at the file."""

ApiKeys = tuple[ApiKey, ...]
Apply = Callable[[ApiKeys], None]


FILE = "security.apiKeysFile"


class KeyFile:
    """The file of further keys. A missing, empty or broken file removes no keys; each fault is logged once."""

    def __init__(self, path: str, environ: Mapping[str, str]) -> None:
        self.path = Path(path)
        self._environ = environ
        self._file = WatchedFiles([path])

    def read(self) -> ApiKeys:
        return self._file.read(self._load)

    async def watch(self, apply: Apply) -> None:
        """Follow changes until cancelled; `apply` gets all keys of the file and may raise ConfigError."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                keys = await asyncio.to_thread(self._file.read_if_changed, self._load)
                if keys is not None:
                    apply(keys)
                    log.info("read %d API keys from %s, which has changed", len(keys), self.path)
            except ConfigError as error:
                log.error("failed to read the API keys; the keys before stay in use: %s", error)

    def _load(self) -> ApiKeys:
        try:
            return self._parse()
        except ConfigError as error:
            raise error.in_file_of(FILE) from None

    def _parse(self) -> ApiKeys:
        entries = yaml_source.read(yaml_source.text_of(self.path), str(self.path), self._environ)
        if entries is None:
            raise ConfigError([Problem(str(self.path), "is empty; write [] for no keys")])
        try:
            keys: Any = params.coerce(tuple[ApiKey, ...], entries, str(self.path))
        except params.Invalid as invalid:
            raise ConfigError(invalid.problems) from None
        read: ApiKeys = keys
        return read


class AuthorizingResolver:
    """Checks that the key may use the model and notes the identity; then calls the resolver of the models, if there is
    one."""

    def __init__(self, models: Resolver | None = None, counts_tokens: Callable[[Identity], bool] | None = None) -> None:
        """`counts_tokens`: whether pods must report usage for this identity; None: never."""
        self._models = models
        self._counts_tokens = counts_tokens

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        """Raise UnknownModel for a model that the key may not use, as for a model that does not exist."""
        if identity is not None and not allows(identity.models, request.model):
            raise UnknownModel(request.model)
        if self._models is not None:
            request = self._models.resolve(request, identity)
        if identity is None:
            return request
        request.state.write(IDENTITY, identity)
        if request.tenant != identity.tenant:
            request = changed(request, tenant=identity.tenant)
        return with_usage(request) if self._counts_tokens is not None and self._counts_tokens(identity) else request
