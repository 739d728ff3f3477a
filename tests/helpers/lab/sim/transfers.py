"""A prefill pod and a decode pod, and what a proxy says to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.lab.sim import SimConfig, SimFleet, SimPod, TransferTiming
from proxy.lab.sim.config import ConnectorName, Role

COMPLETIONS = "/v1/completions"
PROMPT = "word" * 100
"""Of 100 tokens."""

TIMING = TransferTiming(failure=0.1)


@dataclass(frozen=True, slots=True)
class Pair:
    sim: SimFleet
    http: aiohttp.ClientSession

    @property
    def prefill(self) -> SimPod:
        return self.sim.pods[0]

    @property
    def decode(self) -> SimPod:
        return self.sim.pods[1]

    async def ask(self, pod: SimPod, path: str = COMPLETIONS, *, request_id: str = "r", **body: Any) -> tuple[int, Any]:
        headers = {"x-request-id": request_id}
        given = {"prompt": PROMPT} if path == COMPLETIONS else {}
        async with self.http.post(pod.url + path, json={**given, **body}, headers=headers) as response:
            return response.status, await response.json()

    async def prefilled(self, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        """What the prefill pod says to the decode pod."""
        status, reply = await self.ask(
            self.prefill, path, **{"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **body}
        )
        assert status == 200
        params: dict[str, Any] = reply["kv_transfer_params"]
        return params

    async def metrics(self, pod: SimPod) -> dict[str, float]:
        async with self.http.get(pod.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@asynccontextmanager
async def pair(
    connector: ConnectorName, timing: TransferTiming = TIMING, time_scale: float = 1.0, **more: Any
) -> AsyncIterator[Pair]:
    roles: tuple[Role, ...] = ("prefill", "decode")
    configs = [
        SimConfig(role=role, connector=connector, transfer=timing, time_scale=time_scale, **more) for role in roles
    ]
    async with SimFleet(2, configs) as sim, aiohttp.ClientSession() as http:
        yield Pair(sim, http)
