"""Who comes in: what a request brings with it is checked on its head."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

from proxy.access.key_file import KeyFile
from proxy.access.keys import Keys, presented
from proxy.access.settings import Access, ApiKey, Jwt, Limits, Scope, check_keys
from proxy.core.errors import ConfigError, IssuerAway, Problem, Unauthorized
from proxy.core.identity import Identity
from proxy.core.ports import Clock
from proxy.core.state import Draft
from proxy.core.tasks import Tasks

Fetch = Callable[[str], Awaitable[tuple[int, bytes]]]
"""URL -> status and body. Raises `outbound.FAILURES`."""


class Tokens(Protocol):
    """What an issuer signs; `web_tokens.WebTokens` checks it."""

    def find(self, token: str, scope: Scope) -> Identity | None:
        """None if its keys have to be asked for first. Raises Unauthorized, Forbidden or IssuerAway."""

    async def ask(self) -> None:
        """Looks for keys that are not known, for so long as a request may wait."""


class Door:
    """`async with`: inside of it, changes of the key file are seen."""

    def __init__(self, access: Access, clock: Clock, environ: Mapping[str, str], tokens: Tokens | None = None) -> None:
        """Raises ConfigError for the file's faults."""
        self._access = access
        self._clock = clock
        self._tasks = Tasks()
        self._file = KeyFile(access.api_keys_file, environ) if access.api_keys_file is not None else None
        self.tokens = tokens
        self.limits: dict[str, Limits] = {}
        """By the names that identities and tenants give; changes with the file."""
        self._keys = self._known(self._file.read() if self._file is not None else ())

    async def __aenter__(self) -> Door:
        if self._file is not None:
            self._tasks.keep(partial(self._file.watch, self._replace), "key-file")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()

    @property
    def limits_some(self) -> bool:
        """Whether anybody has limits, or may have tomorrow."""
        return bool(self.limits) or self._file is not None

    @property
    def tenants(self) -> dict[str, str]:
        """The names of their limits, by theirs."""
        return {name: _name_of(f"tenants.{name}", tenant.limits) for name, tenant in self._access.tenants.items()}

    def find(self, headers: Mapping[str, str], scope: Scope = "inference") -> Identity | None:
        """Who asks, at once; None if that takes waiting. Raises Unauthorized, or Forbidden for who may do other things
        only."""
        secret = presented(headers)
        if secret is None:
            raise Unauthorized("An API key is needed: send `Authorization: Bearer <key>`.")
        identity = self._keys.find(secret, scope)
        if identity is not None:
            return identity
        if self.tokens is None or secret.count(".") != 2:
            raise Unauthorized("This API key is not known here.")
        return self.tokens.find(secret, scope)

    async def authenticate(self, headers: Mapping[str, str], scope: Scope = "inference") -> Identity:
        """As `find`, after waiting. Raises IssuerAway too."""
        identity = self.find(headers, scope)
        if identity is None and self.tokens is not None:
            await self.tokens.ask()
            identity = self.find(headers, scope)
        if identity is None:
            raise IssuerAway
        return identity

    def _replace(self, keys: Sequence[ApiKey]) -> None:
        self._keys = self._known(keys)

    def _known(self, further: Sequence[ApiKey]) -> Keys:
        """Raises ConfigError, and nothing has changed then."""
        keys = (*self._access.api_keys, *further)
        try:
            check_keys(keys, self._access.limits)
            known = Keys(keys, self._clock)
        except ValueError as error:
            where = "security" if self._file is None else self._access.api_keys_file or ""
            raise ConfigError([Problem(where, str(error))]) from None
        self.limits.clear()
        self.limits.update({**self._access.limits, **_limits_of_their_own(self._access), **known.limits})
        return known


def door_of(access: Access, clock: Clock, environ: Mapping[str, str], fetch: Fetch, draft: Draft) -> Door | None:
    """Return the door of a configuration, or None where no credentials are asked for. `fetch` gets an issuer's keys;
    keys of the same issuer that are in use stay. Raises ConfigError."""
    if not access.asks:
        return None
    tokens = None if access.jwt is None else _tokens(access.jwt, fetch, clock, draft)
    return draft.get("door", lambda: Door(access, clock, environ, tokens), access)


def _tokens(settings: Jwt, fetch: Fetch, clock: Clock, draft: Draft) -> Tokens:
    try:
        from proxy.access.web_keys import REFRESH, WebKeys
        from proxy.access.web_tokens import WebTokens
    except ImportError:
        raise ConfigError([Problem("security.jwt", "needs the extra: pip install 'kvlane[jwt]'")]) from None
    issuer = (settings.issuer, settings.jwks)
    keys = draft.get("web-keys", lambda: WebKeys(settings.jwks, REFRESH, fetch, clock), issuer)
    return WebTokens(settings, _name_of("jwt", settings.limits), keys, clock)


def _limits_of_their_own(access: Access) -> dict[str, Limits]:
    others = [(f"tenants.{name}", tenant.limits) for name, tenant in access.tenants.items()]
    others += [("jwt", access.jwt.limits)] if access.jwt is not None else []
    return {name: limits for name, limits in others if isinstance(limits, Limits)}


def _name_of(own: str, limits: Limits | str | None) -> str:
    return own if isinstance(limits, Limits) else limits or ""
