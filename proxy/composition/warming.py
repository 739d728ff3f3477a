"""Warm-ups of pods that come with nothing cached, where they are configured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange
from proxy.core.ports import Clock, Random
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.warmup import Warmup
from proxy.fleet.warmup_prompts import SharedPrompts
from proxy.gateway import Gateway
from proxy.http.upstream.fetch import PooledFetcher
from proxy.http.upstream.trust import Trust
from proxy.warming import WarmingSender

FirstByte = Callable[[Exchange], None]


class Warming:
    """Pods are warmed up from `begin` on, with prompts that answers have come to."""

    def __init__(self, settings: WarmupSettings, clock: Clock, rng: Random) -> None:
        self._settings = settings
        self._clock = clock
        self._random = rng
        self._prompts = SharedPrompts(settings, clock) if settings.prompts else None
        self._warmup: Warmup | None = None

    async def begin(self, stack: AsyncExitStack, gateway: Gateway, trust: Trust) -> None:
        if self._prompts is None:
            return
        settings, clock = self._settings, self._clock
        poster = await stack.enter_async_context(PooledFetcher(settings.timeout, clock, trust))
        sender = WarmingSender(gateway, poster, clock)
        self._warmup = await stack.enter_async_context(Warmup(settings, self._prompts, sender, clock, self._random))

    def warm(self, endpoint: Endpoint) -> None:
        if self._warmup is not None:
            self._warmup.begin(endpoint)

    def seeing(self, first_byte: FirstByte) -> FirstByte:
        """Who is told of first bytes: also those who collect prompts, where there are any."""
        prompts = self._prompts
        if prompts is None:
            return first_byte

        def first_byte_seen(exchange: Exchange) -> None:
            first_byte(exchange)
            if exchange.status is not None and exchange.status < 300:
                prompts.see(exchange.request)

        return first_byte_seen
