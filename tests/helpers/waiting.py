"""Waiting for what comes true by itself. Limits are for tests that fail: no machine is so busy as to meet them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds."""


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Raises TimeoutError if it does not come true.

    Polls less often the longer it waits: where waits are skipped, polls are what takes time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    pause = 0.001
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(pause)
            pause = max(min(2 * pause, 0.005), (loop.time() - began) / 50)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Where there is no loop; raises TimeoutError, too."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)
