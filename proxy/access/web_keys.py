"""The public keys of an issuer (RFC 7517), read again and again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jwt
import orjson

from proxy import outbound
from proxy.access.door import Fetch
from proxy.core.frozen import frozen
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks

log = logging.getLogger(__name__)

REFRESH = 300.0
"""Seconds between two reads of the issuer's keys."""

PATIENCE = 2.0
"""Seconds that a request waits for a key that is not known."""

COOLDOWN = 10.0
"""Seconds between two looks for keys that are not known: anybody can make such a token up."""


@frozen
class WebKey:
    """`algorithm` is the only one it is for; None: any that fits."""

    key: Any
    algorithm: str | None


class WebKeys:
    """`async with`: inside of it the keys are read. Known keys stay while the issuer cannot be asked."""

    def __init__(self, source: str, interval: float, fetch: Fetch, clock: Clock) -> None:
        """`source` is a URL or a file; `interval` is in seconds."""
        self._source = source
        self.interval = interval
        self._fetch = fetch
        self._clock = clock
        self._tasks = Tasks()
        self.version = 0
        """Changes with the keys."""
        self._keys: Mapping[str, WebKey] = {}
        self._text = b""
        self._failing = False
        self._looking = True
        """Whether it will soon be known what there is: at first, it will."""
        self._wanted = asyncio.Event()
        self._done = asyncio.Event()
        self._asked_at = -math.inf

    async def __aenter__(self) -> WebKeys:
        self._tasks.keep(self._run, "keys-of-the-issuer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()

    def find(self, kid: str | None) -> WebKey | None:
        """The key of this id; without an id, the only one."""
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid)

    @property
    def are_current(self) -> bool:
        """Whether the issuer has no others, as far as is known: it could be asked when last it was."""
        return bool(self._keys) and not self._failing

    @property
    def can_be_asked(self) -> bool:
        """Whether looking again is allowed, or is going on."""
        return self._looking or self._clock.now() - self._asked_at >= COOLDOWN

    async def ask(self) -> None:
        """Looks again, for so long as a request may wait."""
        if not self._looking:
            self._asked_at = self._clock.now()
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
                log.error("the keys of %s cannot be had, those that are known stay: %s", self._source, error)
            self._failing = True
            return
        self._failing = False
        self._text = text
        if keys is not self._keys:
            self._keys = keys
            self.version += 1
            log.info("%d keys of %s", len(keys), self._source)

    async def _text_of_the_source(self) -> bytes:
        if not self._source.startswith(("http://", "https://")):
            return await asyncio.to_thread(Path(self._source).read_bytes)
        status, body = await self._fetch(self._source)
        if status != 200:
            raise ValueError(f"the answer is a {status}")
        return body


def read_keys(text: bytes) -> dict[str, WebKey]:
    """By their ids. Keys that are not for signatures, or of a kind that is not known, are passed over. Raises
    ValueError if none is left."""
    fields = orjson.loads(text)
    entries = fields.get("keys") if isinstance(fields, dict) else None
    if not isinstance(entries, list):
        raise ValueError("there is no list of keys in it")
    keys: dict[str, WebKey] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, dict) and entry.get("use", "sig") == "sig" and entry.get("kty") in ("RSA", "EC", "OKP"):
            try:
                keys[str(entry.get("kid", number))] = WebKey(jwt.PyJWK(entry).key, entry.get("alg"))
            except Exception as error:  # noqa: BLE001  # the libraries below raise what they like
                log.warning("a key of the issuer cannot be read: %r", error)
    if not keys:
        raise ValueError("it has no key for signatures")
    return keys
