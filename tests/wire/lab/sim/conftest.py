"""A fast pod, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, SimPod


@pytest.fixture
async def pod() -> AsyncIterator[SimPod]:
    async with SimPod(SimConfig(time_scale=20)) as pod:
        yield pod


@pytest.fixture
async def client(pod: SimPod) -> AsyncIterator[aiohttp.ClientSession]:
    """Its paths are relative to the pod."""
    async with aiohttp.ClientSession(pod.url) as session:
        yield session
