"""Data-parallel ranks, whichever worker gets the request."""

from __future__ import annotations

import asyncio

from proxy.lab.sim import SimConfig
from tests.helpers.cluster.host import host
from tests.helpers.waiting import until

RANKS = 3


async def test_all_workers_know_the_ranks_of_a_pod_and_a_drain_covers_all_ranks() -> None:
    config = SimConfig(time_scale=20, data_parallel_size=RANKS)
    async with host(2, pods=1, config=config) as it:
        await until(lambda: len(it.supervisor.fleet.ready) == RANKS)
        names = {f"pod-0/{rank}" for rank in range(RANKS)}
        assert set(await asyncio.gather(*(it.chat(f"conversation {number} " * 40) for number in range(12)))) <= names
        (pod,) = (await it.admin("GET", "/admin/pods"))["pods"]
        assert (pod["name"], {rank["name"] for rank in pod["ranks"]}) == ("pod-0", names)
        await it.admin("POST", "/admin/pods/pod-0/drain")
        await until(lambda: not it.supervisor.fleet.ready)
