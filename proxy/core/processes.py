"""The end of helper processes."""

from __future__ import annotations

import contextlib
from asyncio.subprocess import Process


async def kill(process: Process) -> None:
    """Kill the process and wait for its end. Interrupted, it can be called again."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to notice
            process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
        with contextlib.suppress(OSError):  # of what was not written; asyncio logs the error if nothing retrieves it
            await process.stdin.wait_closed()
