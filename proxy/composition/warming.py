"""Warm-ups of pods that come with nothing cached, in the pools for which they are configured."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.listener import Listener
from proxy.core.ports import Clock, Random
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.warmup import Warmup
from proxy.fleet.warmup_prompts import SharedPrompts
from proxy.gateway import Gateway
from proxy.http.upstream.fetch import PooledFetcher
from proxy.http.upstream.trust import Trust
from proxy.pool_settings import PoolSettings
from proxy.warming import WarmingSender


@dataclass(slots=True)
class _Warmed:
    """One pool. `warmup` is there while pods are warmed up, and `running` is what that needs."""

    settings: WarmupSettings
    prompts: SharedPrompts
    warmup: Warmup | None = None
    running: AsyncExitStack = field(default_factory=AsyncExitStack)


class Warming(Listener):
    """Pods are warmed up from `begin` on, with prompts that answers of their pool have come to."""

    def __init__(self, pools: Mapping[str, PoolSettings], clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._random = rng
        self._pools: dict[str, _Warmed] = {}
        self._left: list[_Warmed] = []
        """Of pools that are warmed up no more."""
        self.change(pools)

    async def begin(self, stack: AsyncExitStack, gateway: Gateway, trust: Trust) -> None:
        self._gateway, self._trust = gateway, trust
        stack.push_async_callback(self._end)
        await self.follow()

    def change(self, pools: Mapping[str, PoolSettings]) -> None:
        """Prompts that were kept stay, as many as are wanted; `follow` does the rest."""
        wanted = {name: pool.pods.warmup for name, pool in pools.items() if pool.pods.warmup.prompts}
        self._left += [self._pools.pop(name) for name in self._pools.keys() - wanted.keys()]
        for name, settings in wanted.items():
            known = self._pools.get(name)
            if known is None:
                self._pools[name] = _Warmed(settings, SharedPrompts(settings, self._clock))
            elif known.settings != settings:
                known.prompts.change(settings)
                self._left.append(known)
                self._pools[name] = _Warmed(settings, known.prompts)

    async def follow(self) -> None:
        """What has changed."""
        while self._left:
            await self._left.pop().running.aclose()
        for warmed in self._pools.values():
            if warmed.warmup is None:
                await self._start(warmed)

    def warm(self, endpoint: Endpoint) -> None:
        warmed = self._pools.get(endpoint.pool)
        if warmed is not None and warmed.warmup is not None:
            warmed.warmup.begin(endpoint)

    def __bool__(self) -> bool:
        """Return whether pods of any pool are warmed up."""
        return bool(self._pools)

    def first_byte(self, attempt: Attempt) -> None:
        """Collect the prompts of good responses."""
        warmed = self._pools.get(attempt.endpoint.pool)
        if warmed is not None and attempt.status is not None and attempt.status < 300:
            warmed.prompts.see(attempt.request)

    async def _start(self, warmed: _Warmed) -> None:
        settings, clock, stack = warmed.settings, self._clock, warmed.running
        poster = await stack.enter_async_context(PooledFetcher(settings.timeout, clock, self._trust))
        sender = WarmingSender(self._gateway, poster, clock)
        warmup = Warmup(settings, warmed.prompts, sender, clock, self._random)
        warmed.warmup = await stack.enter_async_context(warmup)

    async def _end(self) -> None:
        self.change({})
        await self.follow()
