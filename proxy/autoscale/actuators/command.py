"""Runs a program, without a shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Mapping, Sequence

import orjson

from proxy.autoscale.actuators.order import Hand, Order
from proxy.autoscale.loop import Outcome

log = logging.getLogger(__name__)

TEMPORARILY = os.EX_TEMPFAIL

_PLACEHOLDER = re.compile(r"\{(pool|role|desired|current|victims)\}")


class Command(Hand):
    """`{pool} {role} {desired} {current} {victims}` in an argument are filled in, victims with commas between them; the
    environment has the same as AUTOSCALE_POOL and so on, stdin the decision as JSON. 0 is ok, 75 (EX_TEMPFAIL) busy.
    One that takes longer than `timeout` seconds is killed."""

    def __init__(self, argv: Sequence[str], timeout: float) -> None:
        self._argv = argv
        self._timeout = timeout

    async def scale(self, order: Order) -> Outcome:
        values = values_of(order)
        argv = [_PLACEHOLDER.sub(lambda found: values[found[1]], one) for one in self._argv]
        return await run(argv, self._timeout, orjson.dumps(order.as_dict()), values)


def values_of(order: Order) -> dict[str, str]:
    return {
        "pool": order.pool,
        "role": order.role,
        "desired": str(order.count),
        "current": str(order.current),
        "victims": ",".join(order.victims),
    }


async def run(
    argv: Sequence[str], timeout: float, stdin: bytes = b"", values: Mapping[str, str] | None = None
) -> Outcome:
    """Raises OSError if there is no such program."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **{f"AUTOSCALE_{name.upper()}": value for name, value in (values or {}).items()}},
    )
    try:
        async with asyncio.timeout(timeout):
            _, said = await process.communicate(stdin)
    except BaseException:  # too late, or nobody waits any more: it is not left behind
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode == TEMPORARILY:
        return Outcome.BUSY
    if process.returncode:
        log.warning("%s ended with %d: %s", argv[0], process.returncode, said.decode(errors="replace")[-500:].strip())
        return Outcome.ERROR
    return Outcome.OK
