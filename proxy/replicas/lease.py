"""Something that one host of a deployment has at a time, such as the say about how many pods there are."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from proxy.replicas.redis_line import OPEN_TIMEOUT, close, failures, keys_of, library
from proxy.replicas.settings import ReplicaSettings

_IF_HELD = "if redis.call('get', KEYS[1]) == ARGV[1] then return %s else return 0 end"
_RENEW = _IF_HELD % "redis.call('pexpire', KEYS[1], ARGV[2])"
_RELEASE = _IF_HELD % "redis.call('del', KEYS[1])"


class Lease:
    """Held for `seconds` by the store's clock after it was last taken. Whoever holds it takes it again well before, and
    stops what he does under it when that fails: nobody knows then whether another one has it."""

    def __init__(self, settings: ReplicaSettings, name: str, seconds: float) -> None:
        """Raises ConfigError without the library."""
        redis = library()
        self._failures = failures(redis)
        self._client = keys_of(settings, redis)
        self._key = f"{settings.prefix}:lease:{name}"
        self.seconds = seconds
        self._milliseconds = int(seconds * 1000)
        self._token = secrets.token_hex(8)

    async def take(self) -> bool:
        """Whether it is held from now on, again or for the first time; not if the store does not say so at once."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                if await self._client.set(self._key, self._token, nx=True, px=self._milliseconds):
                    return True
                return bool(await self._client.eval(_RENEW, 1, self._key, self._token, self._milliseconds))
        except self._failures:
            return False

    async def release(self) -> None:
        """If it is held; if the store cannot be told, it runs out."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                await self._client.eval(_RELEASE, 1, self._key, self._token)
        except self._failures:
            pass

    async def close(self) -> None:
        with suppress(*self._failures):
            await close(self._client)
