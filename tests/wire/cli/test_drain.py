"""Pods are taken out of service and back from a terminal."""

from __future__ import annotations

import asyncio
from typing import Any

from click.testing import CliRunner, Result

from proxy.cli import main
from tests.helpers.scenarios.stack import Stack, stack

CHAT = "/v1/chat/completions"
LONG = {"model": "sim", "max_tokens": 4000, "messages": [{"role": "user", "content": "Tell me of the sea."}]}


async def run(s: Stack, *arguments: str, **environ: str) -> Result:
    words = [*arguments, "--url", s.admin.removeprefix("http://")]
    return await asyncio.to_thread(CliRunner().invoke, main, words, env=environ)


async def state(s: Stack, pod: str) -> Any:
    async with s.http.get(f"{s.admin}/admin/pods/{pod}") as reply:
        return (await reply.json())["state"]


async def test_a_pod_is_drained_and_undrained() -> None:
    async with stack(2) as s:
        drained = await run(s, "drain", "pod-0")
        assert (drained.exit_code, drained.output) == (0, "pod-0: draining, empty\n")
        assert await state(s, "pod-0") == "draining"
        back = await run(s, "undrain", "pod-0")
        assert (back.exit_code, back.output) == (0, "pod-0: ready\n")
        assert await state(s, "pod-0") == "ready"


async def test_requests_left_after_the_wait_are_counted_with_exit_code_1() -> None:
    async with stack(1) as s:
        async with s.http.post(s.url + CHAT, json={**LONG, "stream": True}):
            drained = await run(s, "drain", "pod-0", "--wait", "100ms")
        assert drained.exit_code == 1
        assert drained.stdout == "pod-0: draining, 1 request left\n"
        assert "no pod of the pool default is ready" in drained.stderr


async def test_an_unknown_pod_and_a_too_long_wait_are_refused() -> None:
    async with stack(1) as s:
        unknown = await run(s, "drain", "missing")
        assert unknown.exit_code == 2
        assert unknown.stderr == "No pod is named 'missing'; there is pod-0.\n"
        too_long = await run(s, "drain", "pod-0", "--wait", "1h")
        assert too_long.exit_code == 2
        assert await state(s, "pod-0") == "ready"


async def test_the_key_is_required() -> None:
    async with stack(1, settings={"admin": {"port": 0, "apiKey": "secret"}}) as s:
        refused = await run(s, "drain", "pod-0")
        assert refused.exit_code == 2
        assert "KVLANE_ADMIN_KEY" in refused.stderr
        assert (await run(s, "drain", "pod-0", KVLANE_ADMIN_KEY="secret")).exit_code == 0
