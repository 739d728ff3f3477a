from __future__ import annotations

import asyncio
import gc
import sys
from asyncio.subprocess import PIPE

from proxy.offload import kill


async def test_a_process_killed_before_it_reads_its_input_leaves_no_unretrieved_error() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input(); input()", stdin=PIPE)
    assert process.stdin is not None
    process.stdin.write(b"x" * 1_000_000)
    await kill(process)
    assert process.returncode == -9
    del process
    gc.collect()
    assert errors == []


async def test_killing_an_ended_process_is_harmless() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdin=PIPE)
    await process.wait()
    await kill(process)
    await kill(process)
    assert process.returncode == 0
