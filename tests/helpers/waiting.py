"""Waiting for a condition. The limits end tests that fail; even a busy machine does not reach them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds."""


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for the condition. Raise TimeoutError if it stays false.

    Poll less often with time: where waits are skipped, only polls take time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    pause = 0.001
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(pause)
            pause = max(min(2 * pause, 0.005), (loop.time() - began) / 50)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Do the same where there is no loop."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)
