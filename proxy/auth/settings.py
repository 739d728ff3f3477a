"""API keys, tokens and limits: settings of the `security` section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core.errors import ConfigError
from proxy.core.params import Moment, at_its_key, param

Scope = Literal["inference", "admin"]

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Algorithms with a public key: with a shared secret, every verifier of a token could also issue tokens."""

ANY_OTHER = "*"
"""Key of `tenants` for all tenants that are not listed."""

_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each key that refers to them, or of all keys of a tenant together where the tenant does. Tokens are
    counted as pods report them: a request reserves an estimate, which is corrected when it ends."""

    requests_per_minute: int | None = param(
        None, "requests per minute: so many at once, refilled evenly within a minute", at_least=1
    )
    tokens_per_minute: int | None = param(None, "prompt and completion tokens per minute", at_least=1)
    input_tokens_per_minute: int | None = param(None, "prompt tokens per minute", at_least=1)
    output_tokens_per_minute: int | None = param(None, "completion tokens per minute", at_least=1)
    cached_token_weight: float = param(1.0, "weight of a cached prompt token", at_least=0, at_most=1)
    concurrent_requests: int | None = param(None, "requests at the same time", at_least=1)
    tokens_per_day: int | None = param(None, "prompt and completion tokens per day, from midnight UTC", at_least=1)
    shadow: bool = param(False, "count requests over the limit, do not refuse them")

    @property
    def count_tokens(self) -> bool:
        return any(
            (
                self.tokens_per_minute,
                self.input_tokens_per_minute,
                self.output_tokens_per_minute,
                self.tokens_per_day,
            )
        )


@dataclass(frozen=True, slots=True, repr=False)
class ApiKey:
    """`hash` keeps the key itself out of the file: `kvlane key` makes both."""

    name: str = param("", "name in logs and metrics")
    key: str | None = param(None, "the key; better from the environment, as `${TEAM_A_KEY}`, or as a hash")
    hash: str | None = param(None, "`sha256:` and the key's digest in hex")
    tenant: str = param("", "tenant of the key; empty: a tenant with the name of the key")
    models: tuple[str, ...] = param((), "models that the key may use, with `*` as a wildcard; empty: all")
    objectives: tuple[str, ...] = param(
        (), "objectives that its requests may name, with `*` as a wildcard; empty: none"
    )
    scopes: tuple[Scope, ...] = param(("inference",), "ports that accept the key: inference (data), admin")
    limits: Limits | str | None = param(None, "a name among `security.limits`, or limits of its own")
    expires: Moment | None = param(None, "time at which the key expires")

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a key needs a name")
        if (self.key is None) == (self.hash is None):
            raise ValueError(f"the key '{self.name}' needs a key or a hash, one of them")
        if self.key is not None and not self.key.strip():
            raise ValueError(f"the key '{self.name}' is empty")
        if self.hash is not None and not _HASH.fullmatch(self.hash):
            raise ValueError(f"the hash of '{self.name}' must be `sha256:` and 64 hex digits; `kvlane key` makes one")

    def __repr__(self) -> str:
        """Leave out the key: this may get into a log."""
        return f"ApiKey({self.name!r})"


@dataclass(frozen=True, slots=True)
class Tenant:
    limits: Limits | str | None = param(None, "a name among `security.limits`, or limits of its own")


@dataclass(frozen=True, slots=True)
class Jwt:
    """Tokens of an issuer, in place of keys or beside them. A claim is found by its name, or by the names on the way to
    it: `realm_access.roles`."""

    jwks: str = param(doc="URL or file of the issuer's public keys, read every 5 minutes")
    issuer: str = param(doc="required value of `iss`")
    audience: tuple[str, ...] = param(doc="accepted values of `aud`; a token must have one")
    algorithms: tuple[Algorithm, ...] = param(("RS256", "ES256"), "accepted signature algorithms")
    tenant_claim: str | None = param(None, "claim with the tenant; null: each `sub` is a tenant")
    models_claim: str | None = param(None, "claim with the list of models, as `models` of a key; null: all")
    scopes_claim: str | None = param(None, "claim with the list of scopes, `inference` or `admin`; null: inference")
    limits: Limits | str | None = param(None, "limits of each `sub`: a name among `security.limits`, or the limits")

    def __post_init__(self) -> None:
        if not self.audience:
            raise ValueError("audience: is empty; list at least one, or tokens for other services would be accepted")
        if not self.algorithms:
            raise ValueError("algorithms: is empty; no token could be signed")
        if not self.issuer:
            raise ValueError("issuer: is empty")


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Authentication and limits. Without keys and tokens requests need no credentials."""

    api_keys: tuple[ApiKey, ...] = param((), "accepted API keys")
    api_keys_file: str | None = param(None, "file with a list of further keys, read again when it changes")
    jwt: Jwt | None = param(None, "also accept tokens of an issuer; needs the extra kvlane[jwt]")
    limits: Mapping[str, Limits] = param({}, "limits by name, for keys and tenants to refer to")
    tenants: Mapping[str, Tenant] = param({}, f"tenants by name; `{ANY_OTHER}` is for all others")

    @property
    def asks(self) -> bool:
        """Whether requests need credentials."""
        return bool(self.api_keys) or self.api_keys_file is not None or self.jwt is not None

    def __post_init__(self) -> None:
        if found := list(self.faults()):
            raise ConfigError([at_its_key(type(self), "", fault) for fault in found])

    def faults(self) -> Iterator[str]:
        """Yield a message for each setting that contradicts another one, starting with its key."""
        yield from key_faults(self.api_keys, self.limits)
        others = [(f"tenants.{name}.limits:", tenant.limits) for name, tenant in self.tenants.items()]
        if self.jwt is not None:
            others.append(("jwt.limits:", self.jwt.limits))
        for who, limits in others:
            yield from _limit_faults(who, limits, self.limits)
        if (self.limits or self.tenants) and not self.asks:
            yield "limits apply to keys and tenants only: add apiKeys, apiKeysFile or jwt"


def check_keys(keys: Sequence[ApiKey], limits: Iterable[str]) -> None:
    """Raise ValueError for two keys of one name, and for limits that do not exist."""
    for fault in key_faults(keys, limits):
        raise ValueError(fault.partition(": ")[2])  # the index is of keys from several files


def key_faults(keys: Sequence[ApiKey], limits: Iterable[str]) -> Iterator[str]:
    """Yield a message for two keys of one name, and for limits that do not exist."""
    names: set[str] = set()
    for index, key in enumerate(keys):
        if key.name in names:
            yield f"apiKeys[{index}].name: two are named '{key.name}'"
        names.add(key.name)
        yield from _limit_faults(f"apiKeys[{index}].limits: '{key.name}'", key.limits, limits)


def _limit_faults(who: str, named: Limits | str | None, limits: Iterable[str]) -> Iterator[str]:
    if isinstance(named, str) and named not in limits:
        yield f"{who} has the limits '{named}', which security.limits does not name"
