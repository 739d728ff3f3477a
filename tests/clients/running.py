"""Programs of others as clients of a proxy: each runs to its end, and says what it saw."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.clients.recording import RECORD, Recorder
from tests.helpers.scenarios.stack import Stack

CLIENTS = "KVLANE_CLIENTS"
"""Names the folder that `make test-clients` installs into; without it only what every machine has is run."""

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
VENV = ROOT / os.environ.get(CLIENTS, "not-installed")
PYTHON = VENV / "bin" / "python"
NODE = VENV / "node"
PATIENCE = 240.0
"""Seconds; importing some of them takes half a minute on a busy machine."""

OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "ANONYMIZED_TELEMETRY": "false"}


def needs(program: Path, what: str) -> None:
    if CLIENTS not in os.environ:
        pytest.skip("needs clients of others: make test-clients")
    if not program.exists():
        pytest.skip(f"{what} is not installed")


@asynccontextmanager
async def authenticator(s: Stack, client: str) -> AsyncIterator[str]:
    """The URL that a client is given: the proxy's own, or, with KVLANE_RECORD, one that writes down what passes."""
    if not os.environ.get(RECORD):
        yield s.url
        return
    with Recorder(s.url, client) as recorder:
        yield recorder.url


async def output_of(command: Sequence[str | Path], environ: Mapping[str, str] | None = None) -> str:
    """What the program writes on standard output; it has to end well. It and its children end with the test."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **OFFLINE, **(environ or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode == 0, f"{output.decode()[-2000:]}\n{errors.decode()[-4000:]}"
    return output.decode()
