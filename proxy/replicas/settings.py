"""The `replicas` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxy.core.params import param
from proxy.core.units import Duration
from proxy.replicas.address import address_of

NONE = "none"

INTERVAL = 0.01
"""Seconds for which news are batched before they are published; up to five times as long while batches are small."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Several proxies of one deployment that know of each other over Redis or Valkey; needs the extra kvlane[redis].
    Workers of one host always do."""

    store: str = param(
        NONE,
        "none, or where it is: redis://HOST:PORT/DB, rediss:// with TLS, unix://PATH,"
        " redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT,HOST:PORT",
    )
    username: str | None = param(None, "of the store's ACL")
    password: str | None = param(None, "of the store")
    sentinel_username: str | None = param(None, "of the sentinels' ACL")
    sentinel_password: str | None = param(None, "of the sentinels, if they have one: they do not have the store's")
    prefix: str = param("kvlane", "of all channels and keys; those who have the same one belong together")
    name: str | None = param(None, "what the others call this one; the host's name unless given")
    lease: Duration = param(
        Duration(5.0), "after which one that is not heard of is forgotten, with all that it has in flight", at_least=0.5
    )
    limits: Literal["localShare", "open"] = param(
        "localShare",
        "without the store: localShare takes the others to spend what this one does, and keeps to this one's part of"
        " caps; open takes them to do nothing",
    )

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.is_shared:
            return
        is_watched = bool(address_of(self.store).service)
        if not is_watched and (self.sentinel_username or self.sentinel_password):
            raise ValueError("sentinelUsername and sentinelPassword are for redis+sentinel://")
        if not self.prefix:
            raise ValueError("prefix is empty")

    @property
    def is_shared(self) -> bool:
        return self.store != NONE
