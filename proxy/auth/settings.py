"""API keys, tokens and limits: settings of the `security` section."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core.params import param
from proxy.core.units import Moment

Scope = Literal["inference", "admin"]

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Those with a public key: with a shared secret, whoever checks a token could make one."""

ANY_OTHER = "*"
"""Among tenants: those that are not named."""

_HASH = re.compile(r"sha256:[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Of every key that names them, and of all keys of a tenant together where a tenant names them. Tokens are counted
    as pods report them; a request reserves what it may take, and gives back what it did not."""

    requests_per_minute: int | None = param(None, "requests", at_least=1)
    tokens_per_minute: int | None = param(None, "tokens of prompts and answers", at_least=1)
    input_tokens_per_minute: int | None = param(None, "tokens of prompts", at_least=1)
    output_tokens_per_minute: int | None = param(None, "tokens of answers", at_least=1)
    cached_token_weight: float = param(1.0, "what a prompt token counts that was cached", at_least=0, at_most=1)
    concurrent_requests: int | None = param(None, "requests at the same time", at_least=1)
    tokens_per_day: int | None = param(None, "tokens of prompts and answers from midnight UTC on", at_least=1)
    shadow: bool = param(False, "only count what would be refused")

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

    name: str = param("", "what logs and metrics call it")
    key: str | None = param(None, "the key; better from the environment, as `${TEAM_A_KEY}`, or as a hash")
    hash: str | None = param(None, "`sha256:` and the key's digest in hex")
    tenant: str = param("", "whose it is; empty: a tenant of its own, of its name")
    models: tuple[str, ...] = param((), "it may ask for, with `*` as a wildcard; empty: all")
    objectives: tuple[str, ...] = param((), "it may name in its requests, with `*` as a wildcard")
    scopes: tuple[Scope, ...] = param(("inference",), "what it opens: the data port, the admin port")
    limits: Limits | str | None = param(None, "a name among `security.limits`, or limits of its own")
    expires: Moment | None = param(None, "when it opens nothing any more")

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
        """Without the key: this may get into a log."""
        return f"ApiKey({self.name!r})"


@dataclass(frozen=True, slots=True)
class Tenant:
    limits: Limits | str | None = param(None, "a name among `security.limits`, or limits of its own")


@dataclass(frozen=True, slots=True)
class Jwt:
    """Tokens of an issuer, in place of keys or beside them. A claim is found by its name, or by the names on the way to
    it: `realm_access.roles`."""

    jwks: str = param(doc="URL or file of the issuer's public keys, read every 5 minutes")
    issuer: str = param(doc="what `iss` must be")
    audience: tuple[str, ...] = param(doc="of which `aud` must have one")
    algorithms: tuple[Algorithm, ...] = param(("RS256", "ES256"), "by which a token may be signed")
    tenant_claim: str | None = param(None, "that names the tenant; null: each `sub` is one, of its own")
    models_claim: str | None = param(None, "list of the models it may ask for, as `models` of a key; null: all")
    scopes_claim: str | None = param(None, "list that has `inference` or `admin` in it; null: inference for all")
    limits: Limits | str | None = param(None, "of each `sub`: a name among `security.limits`, or limits of their own")

    def __post_init__(self) -> None:
        if not self.audience:
            raise ValueError("audience is empty: a token for somebody else would open this")
        if not self.algorithms:
            raise ValueError("algorithms is empty: no token could be signed")
        if not self.issuer:
            raise ValueError("issuer is empty")


@dataclass(frozen=True, slots=True)
class Access:
    """Without keys and tokens nobody is asked who he is."""

    api_keys: tuple[ApiKey, ...] = param((), "who may come in")
    api_keys_file: str | None = param(None, "file with a list of further keys, read again when it changes")
    jwt: Jwt | None = param(None, "tokens that open it too; needs the extra kvlane[jwt]")
    limits: Mapping[str, Limits] = param({}, "by the names under which keys and tenants refer to them")
    tenants: Mapping[str, Tenant] = param({}, f"by name; `{ANY_OTHER}` are those that are not named")

    @property
    def asks(self) -> bool:
        """Whether anybody has to say who he is."""
        return bool(self.api_keys) or self.api_keys_file is not None or self.jwt is not None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        check_keys(self.api_keys, self.limits)
        others = [(f"tenants.{name}", tenant.limits) for name, tenant in self.tenants.items()]
        if self.jwt is not None:
            others.append(("jwt", self.jwt.limits))
        for who, limits in others:
            _check_limits(who, limits, self.limits)
        if (self.limits or self.tenants) and not self.asks:
            raise ValueError("limits are of keys and tenants, and there are none: add apiKeys, apiKeysFile or jwt")


def check_keys(keys: Sequence[ApiKey], limits: Iterable[str]) -> None:
    """Raises ValueError for two keys of one name, and for limits that do not exist."""
    names: set[str] = set()
    for key in keys:
        if key.name in names:
            raise ValueError(f"apiKeys: two are named '{key.name}'")
        names.add(key.name)
        _check_limits(f"apiKeys: '{key.name}'", key.limits, limits)


def _check_limits(who: str, named: Limits | str | None, limits: Iterable[str]) -> None:
    if isinstance(named, str) and named not in limits:
        raise ValueError(f"{who} has the limits '{named}', which security.limits does not name")
