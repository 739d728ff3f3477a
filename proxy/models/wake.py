"""Wakes pods that sleep, when somebody wants what nobody else serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from proxy.core.endpoint import LIGHT_SLEEP, Endpoint, EndpointState
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import Clock, Poster
from proxy.core.tasks import Tasks

log = logging.getLogger(__name__)

WAKE_UP = "/wake_up"

AGAIN = 10.0
"""Seconds after which a pod that did not wake up is told again."""

LOOK = 0.05
"""Seconds between two looks at whether it is there: pods are asked some times a second."""


class Fleet(Protocol):
    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    def serving(self, model: str) -> Sequence[Endpoint]: ...


class Waker:
    """One pod is woken for a model, however many ask for it."""

    def __init__(self, fleet: Fleet, poster: Poster, clock: Clock, tasks: Tasks, timeout: float) -> None:
        """`timeout`: seconds that anybody waits at most."""
        self._fleet = fleet
        self._poster = poster
        self._clock = clock
        self._tasks = tasks
        self.timeout = timeout
        self._waking: set[Endpoint] = set()
        self._left_alone: dict[Endpoint, float] = {}
        """Those that were told in vain, and until when they are not told again."""

    def wake(self, model: str) -> bool:
        """Begins to; False if nobody sleeps who serves it and can be woken."""
        now = self._clock.now()
        self._left_alone = {endpoint: until for endpoint, until in self._left_alone.items() if until > now}
        asleep = [
            endpoint
            for endpoint in self._fleet.endpoints
            if _sleeps(endpoint) and _serves(endpoint, model) and endpoint not in self._left_alone
        ]
        if asleep and self._waking.isdisjoint(asleep):
            self._waking.add(asleep[0])
            self._tasks.start(self._wake(asleep[0]), f"wake-up of {asleep[0].name}")
        return bool(asleep)

    async def awake(self, model: str, deadline: float) -> bool:
        """Waits until somebody serves it; False if that takes too long, or if whoever was woken cannot."""
        end = min(deadline, self._clock.now() + self.timeout)
        while not self._fleet.serving(model):
            if self._clock.now() >= end or not self.wake(model):
                return bool(self._fleet.serving(model))
            await asyncio.sleep(LOOK)
        return True

    async def _wake(self, endpoint: Endpoint) -> None:
        log.info("pod %s is woken up: a request wants what it serves", endpoint.name)
        end = self._clock.now() + self.timeout
        try:
            status, _ = await self._poster.post(endpoint.url + WAKE_UP, b"", endpoint.api_key)
            if status >= 300:
                raise UpstreamFailed(f"it answered {status}")
            while endpoint.metrics.sleep_level:
                if self._clock.now() >= end:
                    raise UpstreamFailed("it says that it sleeps")
                await asyncio.sleep(LOOK)
        except UpstreamFailed as error:
            log.warning("pod %s does not wake up: %s", endpoint.name, error)
            self._left_alone[endpoint] = self._clock.now() + AGAIN
        finally:
            self._waking.discard(endpoint)


def _sleeps(endpoint: Endpoint) -> bool:
    return endpoint.metrics.sleep_level == LIGHT_SLEEP and endpoint.state is not EndpointState.DRAINING


def _serves(endpoint: Endpoint, model: str) -> bool:
    return not endpoint.models or not model or model in endpoint.models
