"""Tokens that an issuer signs (JSON Web Tokens, RFC 7519): what one says is believed if the issuer's key fits."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jwt

from proxy.access.settings import Jwt, Scope
from proxy.access.web_keys import WebKeys
from proxy.core.errors import LONGEST_NAME, Forbidden, IssuerAway, Unauthorized
from proxy.core.frozen import frozen
from proxy.core.identity import Identity
from proxy.core.ports import Clock

REMEMBERED = 10_000
"""Tokens that were found good: one check takes some 100 µs."""

LONGEST = 16 * 1024
"""Characters of a token."""

LATEST = 1e12
"""Seconds since the Unix epoch; what is no number, or too large for one, is not before it."""

NOT_SIGNED = "The token is not signed by a key that its issuer has."


@frozen
class Seen:
    """`until` is seconds since the Unix epoch."""

    identity: Identity
    scopes: frozenset[str]
    until: float


class WebTokens:
    """Implements `door.Tokens`."""

    def __init__(self, settings: Jwt, limits: str, keys: WebKeys, clock: Clock) -> None:
        """`limits` is the name of those that each subject has."""
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self._keys = keys
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        self._version = keys.version
        """Of the keys that the tokens in `_seen` were checked with."""

    def find(self, token: str, scope: Scope) -> Identity | None:
        if self._keys.version != self._version:  # tokens may be signed by keys that the issuer has withdrawn
            self._version = self._keys.version
            self._seen.clear()
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        seen = self._seen.get(digest)
        if seen is None:
            seen = self._checked(token)
            if seen is None:
                return None
            self._remember(digest, seen)
        if self._clock.wall() >= seen.until:
            raise Unauthorized("This token has expired.")
        if scope not in seen.scopes:
            raise Forbidden(f"The token of '{seen.identity.name}' has no scope '{scope}'.")
        return seen.identity

    async def ask(self) -> None:
        await self._keys.ask()

    def _checked(self, token: str) -> Seen | None:
        """None if its key is not known, and may be in a while."""
        if len(token) > LONGEST:
            raise Unauthorized("This token is too long.")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise Unauthorized("This is neither a known API key nor a token.") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.algorithms:
            raise Unauthorized("The token is not signed by an algorithm that is accepted here.")
        key = self._keys.find(kid)
        if key is None:
            if self._keys.can_be_asked:
                return None
            if not self._keys.are_current:
                raise IssuerAway
            raise Unauthorized(NOT_SIGNED)
        if key.algorithm not in (None, algorithm):
            raise Unauthorized("The token is not signed as its key is meant for.")
        return self._read(self._verified(token, key.key, str(algorithm)))

    def _verified(self, token: str, key: Any, algorithm: str) -> Mapping[str, Any]:
        """The claims. What depends on the time is looked at here, by the clock that was handed in."""
        settings = self._settings
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=list(settings.audience),
                issuer=settings.issuer,
                options={
                    "require": ["exp", "iss", "aud", "sub"],
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.MissingRequiredClaimError as error:
            raise Unauthorized(f"The token has no claim '{error.claim}'.") from None
        except jwt.InvalidIssuerError:
            raise Unauthorized("The token is of another issuer.") from None
        except jwt.InvalidAudienceError:
            raise Unauthorized("The token is for somebody else: its audience does not fit.") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise Unauthorized("The token's signature does not fit, or it is garbled.") from None
        begins = _time(claims.get("nbf", 0.0))
        if begins is None or self._clock.wall() + settings.leeway < begins:
            raise Unauthorized("This token is not valid yet.")
        return claims

    def _read(self, claims: Mapping[str, Any]) -> Seen:
        """Raises Unauthorized if it does not say what it has to."""
        settings = self._settings
        ends, subject = _time(claims["exp"]), claims["sub"]
        if ends is None or not _is_name(subject):
            raise Unauthorized("The token's claims 'exp' and 'sub' must be a time and a name.")
        name = f"jwt:{subject}"
        tenant = name
        if settings.tenant_claim is not None:
            said = _claim(claims, settings.tenant_claim)
            if not _is_name(said):
                raise Unauthorized(f"The token has no claim '{settings.tenant_claim}'.")
            tenant = said
        models = None if settings.models_claim is None else _texts(_claim(claims, settings.models_claim))
        scopes = frozenset(("inference",))
        if settings.scopes_claim is not None:
            scopes = _texts(_claim(claims, settings.scopes_claim))
        identity = Identity(name, tenant, models, frozenset(), self._limits)
        return Seen(identity, scopes, ends + settings.leeway)

    def _remember(self, digest: bytes, seen: Seen) -> None:
        self._seen[digest] = seen
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def _claim(claims: Any, name: str) -> Any:
    """None if there is none."""
    if not isinstance(claims, Mapping):
        return None
    if name in claims:
        return claims[name]
    first, dot, rest = name.partition(".")
    return _claim(claims.get(first), rest) if dot else None


def _is_name(claim: Any) -> bool:
    """Whether it can be written into a log, and be a label."""
    return isinstance(claim, str) and 0 < len(claim) <= LONGEST_NAME and claim.isprintable()


def _texts(claim: Any) -> frozenset[str]:
    """Of a list, or of a text with spaces in between, as `scope` has it (RFC 8693)."""
    if isinstance(claim, str):
        return frozenset(claim.split())
    return frozenset(item for item in claim if isinstance(item, str)) if isinstance(claim, list) else frozenset()


def _time(claim: Any) -> float | None:
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not abs(claim) < LATEST:
        return None
    return float(claim)
