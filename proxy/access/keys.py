"""API keys: who holds which, found by its digest."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence

from proxy.access.settings import ApiKey, Limits, Scope
from proxy.core.errors import Forbidden, Unauthorized
from proxy.core.identity import Identity
from proxy.core.ports import Clock

PREFIX = "kvl_"
"""By which scanners of repositories can find keys that were left there."""


class Keys:
    """All there are at one moment; replaced as a whole. Secrets are not kept, only their digests: how long it takes to
    look one up tells nothing of a key, for nobody can choose the digest of what he sends."""

    def __init__(self, keys: Sequence[ApiKey], clock: Clock) -> None:
        """Raises ValueError if two are the same."""
        self._clock = clock
        self._known: dict[bytes, tuple[ApiKey, Identity]] = {}
        self.limits: dict[str, Limits] = {}
        """Those that keys have of their own, by the names that their identities give."""
        for key in keys:
            digest = _digest_of(key)
            if digest in self._known:
                raise ValueError(f"apiKeys: '{self._known[digest][0].name}' and '{key.name}' are the same key")
            self._known[digest] = key, self._identity(key)

    def find(self, secret: str, scope: Scope) -> Identity | None:
        """None if nobody has this key. Raises Unauthorized if it has expired, Forbidden if it does not open that."""
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
        limits = key.limits
        if isinstance(limits, Limits):
            self.limits[own := f"apiKeys.{key.name}"] = limits
            limits = own
        return Identity(
            name=key.name,
            tenant=key.tenant or key.name,
            models=frozenset(key.models) or None,
            objectives=frozenset(key.objectives),
            limits=limits or "",
        )


def presented(headers: Mapping[str, str]) -> str | None:
    """The secret that a request brings: where clients of OpenAI, Anthropic and Azure put it."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and (bearer := bearer.strip()):
        return bearer
    return headers.get("x-api-key") or headers.get("api-key")


def made() -> str:
    """A key that nobody can guess: 256 bits of it."""
    return PREFIX + secrets.token_urlsafe(32)


def hashed(secret: str) -> str:
    """As a configuration keeps it. A key is drawn, not chosen, so there is nothing to be tried out slowly."""
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


def _digest_of(key: ApiKey) -> bytes:
    text = key.hash or hashed((key.key or "").strip())
    return bytes.fromhex(text.partition(":")[2])
