"""JSON Web Tokens (RFC 7519) and the public keys of their issuer (RFC 7517)."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import orjson

from proxy import outbound
from proxy.auth.authenticator import Fetch
from proxy.auth.settings import Jwt, Scope
from proxy.core.errors import LONGEST_NAME, Forbidden, IssuerUnreachable, Unauthorized
from proxy.core.ports import Clock, Identity
from proxy.core.request import frozen
from proxy.core.tasks import Tasks

log = logging.getLogger(__name__)


REMEMBERED = 10_000
"""Verified tokens that are remembered: one verification takes about 100 µs."""

LONGEST = 16 * 1024
"""Characters of a token."""

LATEST = 1e12
"""Seconds since the Unix epoch; later times are invalid."""

NOT_SIGNED = "The token is not signed by a key that its issuer has."


@frozen
class VerifiedToken:
    """`until` is seconds since the Unix epoch."""

    identity: Identity
    scopes: frozenset[str]
    until: float


class JwtVerifier:
    """Verifies tokens of an issuer and remembers the valid ones."""

    def __init__(self, settings: Jwt, limits: str, keys: IssuerKeys, clock: Clock) -> None:
        """`limits`: the name of the limits of each subject."""
        self._settings = settings
        self._limits = limits
        self._clock = clock
        self.keys = keys
        self._seen: OrderedDict[bytes, VerifiedToken] = OrderedDict()
        self._version = keys.version
        """Of the keys that the tokens in `_seen` were checked with."""

    def find(self, token: str, scope: Scope) -> Identity | None:
        """Return None if the keys must be fetched first. Raise Unauthorized, Forbidden or IssuerUnreachable."""
        if self.keys.version != self._version:  # tokens may be signed by keys that the issuer has withdrawn
            self._version = self.keys.version
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

    def unknown_key(self) -> Unauthorized | IssuerUnreachable:
        """Return the error for a token whose key the last read did not find."""
        return Unauthorized(NOT_SIGNED) if self.keys.are_current else IssuerUnreachable()

    def _checked(self, token: str) -> VerifiedToken | None:
        """Return None if its key is unknown and may be fetched."""
        if len(token) > LONGEST:
            raise Unauthorized("This token is too long.")
        try:
            header = jwt.get_unverified_header(token)
        except (jwt.PyJWTError, ValueError, RecursionError):
            raise Unauthorized("This is neither a known API key nor a token.") from None
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.algorithms:
            raise Unauthorized("The token is not signed by an algorithm that is accepted here.")
        key = self.keys.find(kid)
        if key is None:
            if self.keys.may_refresh:
                return None
            raise self.unknown_key()
        if key.algorithm not in (None, algorithm):
            raise Unauthorized("The token is not signed as its key is meant for.")
        return self._read(self._verified(token, key.key, str(algorithm)))

    def _verified(self, token: str, key: Any, algorithm: str) -> Mapping[str, Any]:
        """Return the claims. Times are compared here, with the injected clock."""
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
            raise Unauthorized("The token has another audience.") from None
        except (jwt.PyJWTError, ValueError, TypeError):
            raise Unauthorized("The token's signature does not fit, or it is garbled.") from None
        begins = _time(claims.get("nbf", 0.0))
        if begins is None or self._clock.wall() + LEEWAY < begins:
            raise Unauthorized("This token is not valid yet.")
        return claims

    def _read(self, claims: Mapping[str, Any]) -> VerifiedToken:
        """Return the identity and scopes. Raise Unauthorized for missing or invalid claims."""
        settings = self._settings
        ends, subject = _time(claims["exp"]), claims["sub"]
        if ends is None or not _is_name(subject):
            raise Unauthorized("The token's claims 'exp' and 'sub' must be a time and a name.")
        name = f"jwt:{subject}"
        tenant = name
        if settings.tenant_claim is not None:
            claimed = _claim(claims, settings.tenant_claim)
            if not _is_name(claimed):
                raise Unauthorized(f"The token has no claim '{settings.tenant_claim}'.")
            tenant = claimed
        models = None if settings.models_claim is None else _texts(_claim(claims, settings.models_claim))
        scopes = frozenset(("inference",))
        if settings.scopes_claim is not None:
            scopes = _texts(_claim(claims, settings.scopes_claim))
        identity = Identity(name, tenant, models, frozenset(), self._limits)
        return VerifiedToken(identity, scopes, ends + LEEWAY)

    def _remember(self, digest: bytes, seen: VerifiedToken) -> None:
        self._seen[digest] = seen
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def _claim(claims: Any, name: str) -> Any:
    """Return None if the claim does not exist."""
    if not isinstance(claims, Mapping):
        return None
    if name in claims:
        return claims[name]
    first, dot, rest = name.partition(".")
    return _claim(claims.get(first), rest) if dot else None


def _is_name(claim: Any) -> bool:
    """Return whether the claim is fit for logs and labels."""
    return isinstance(claim, str) and 0 < len(claim) <= LONGEST_NAME and claim.isprintable()


def _texts(claim: Any) -> frozenset[str]:
    """Return the texts of a list, or of a text separated by spaces, as in `scope` (RFC 8693)."""
    if isinstance(claim, str):
        return frozenset(claim.split())
    return frozenset(item for item in claim if isinstance(item, str)) if isinstance(claim, list) else frozenset()


def _time(claim: Any) -> float | None:
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not abs(claim) < LATEST:
        return None
    return float(claim)


REFRESH = 300.0
"""Seconds between two reads of the issuer's keys."""

LEEWAY = 30.0
"""Seconds that the clocks of the issuer and of this host may differ."""

PATIENCE = 2.0
"""Seconds that a request waits for a key that is not known."""

COOLDOWN = 10.0
"""Seconds between two reads for unknown keys: any client can invent such a token."""


@frozen
class IssuerKey:
    """A public key. `algorithm` is the only one it is for; None: any that fits."""

    key: Any
    algorithm: str | None


class IssuerKeys:
    """The public keys of an issuer. Inside `async with` they are read periodically; known keys stay after a failure."""

    def __init__(self, source: str, interval: float, fetch: Fetch, clock: Clock) -> None:
        """`source` is a URL or a file; `interval` is in seconds."""
        self._source = source
        self.interval = interval
        self._fetch = fetch
        self._clock = clock
        self._tasks = Tasks()
        self.version = 0
        """Changes with the keys."""
        self._keys: Mapping[str, IssuerKey] = {}
        self._text = b""
        self._failing = False
        self._looking = True
        """Whether a read is running; the first starts at once."""
        self._wanted = asyncio.Event()
        self._done = asyncio.Event()
        self._refreshed_at = -math.inf

    async def __aenter__(self) -> IssuerKeys:
        self._tasks.keep(self._run, "keys-of-the-issuer")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()

    def find(self, kid: str | None) -> IssuerKey | None:
        """Return the key with this id; without an id, the only key."""
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid)

    @property
    def are_current(self) -> bool:
        """Whether the last read succeeded and none is running: then the issuer has no other keys."""
        return bool(self._keys) and not self._failing and not self._looking

    @property
    def may_refresh(self) -> bool:
        """Whether another read is allowed or running."""
        return self._looking or self._clock.now() - self._refreshed_at >= COOLDOWN

    async def refresh(self) -> None:
        """Fetch the keys again, or wait for the read that is running, for at most the time that a request may wait."""
        if not self._looking:
            self._refreshed_at = self._clock.now()
            self._looking = True
            self._done.clear()
            self._wanted.set()
        try:
            async with asyncio.timeout(PATIENCE):
                await self._done.wait()
        except TimeoutError:
            pass

    async def _run(self) -> None:
        while True:
            self._looking = True
            self._done.clear()
            await self._read()
            self._wanted.clear()
            self._looking = False
            self._done.set()
            try:
                async with asyncio.timeout(self.interval):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def _read(self) -> None:
        try:
            text = await self._text_of_the_source()
            keys = self._keys if text == self._text else read_keys(text)
        except (*outbound.FAILURES, ValueError) as error:
            if not self._failing:
                log.error(
                    "failed to read the issuer's keys from security.jwt.jwks (%s); known keys stay in use: %s",
                    self._source,
                    error,
                )
            self._failing = True
            return
        self._failing = False
        self._text = text
        if keys is not self._keys:
            self._keys = keys
            self.version += 1
            log.info("read %d keys of the issuer from %s", len(keys), self._source)

    async def _text_of_the_source(self) -> bytes:
        if not self._source.startswith(("http://", "https://")):
            return await asyncio.to_thread(Path(self._source).read_bytes)
        status, body = await self._fetch(self._source)
        if status != 200:
            raise ValueError(f"the response has the status {status}")
        return body


def read_keys(text: bytes) -> dict[str, IssuerKey]:
    """Return the keys by id, without keys of unknown kinds or for encryption. Raise ValueError if no key is left."""
    fields = orjson.loads(text)
    entries = fields.get("keys") if isinstance(fields, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it has no list of keys")
    keys: dict[str, IssuerKey] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("use", "sig") == "sig" and entry.get("kty") in ("RSA", "EC", "OKP"):
            try:
                keys[str(entry.get("kid", number))] = IssuerKey(jwt.PyJWK(entry).key, entry.get("alg"))
            except Exception as error:  # noqa: BLE001  # the libraries below raise what they like
                log.warning("skipped a key of the issuer, which cannot be read: %r", error)
    if not keys:
        raise ValueError("it has no key for signatures")
    return keys
