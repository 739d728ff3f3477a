"""With several workers one process scales: the supervisor, by what all of them see."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from proxy.cluster.supervisor import Supervisor
from proxy.lab.sim import SimConfig, SimFleet
from tests.helpers.cluster.host import configured, held, host
from tests.helpers.waiting import until

POOL = "/autoscale/pools/default"

SLOW = SimConfig(time_scale=0.5)
"""Some fifteen milliseconds per token."""

RECORD = "import json, sys; open(sys.argv[1], 'a').write(json.dumps(sys.argv[2:]) + '\\n')"


def policy(file: Path | None = None, low: int = 1) -> dict[str, Any]:
    """One replica is enough; what is to be done is written to the file."""
    section: dict[str, Any] = {
        "behavior": {
            "scaleUp": {"select": "none"},
            "scaleDown": {"select": "none", "stabilization": "0s"},
            "panic": {"hold": "0s"},
        },
        "settle": "0s",
        "roles": [
            {
                "name": "vllm",
                "min": low,
                "max": 4,
                "metrics": [{"name": "requests_in_flight", "kind": "avg", "target": 100}],
            }
        ],
    }
    if file is not None:
        command = [sys.executable, "-c", RECORD, str(file), "{desired}", "{victims}"]
        section |= {"mode": "active", "actuator": {"type": "exec", "command": command}}
    return {"autoscale": {"interval": "100ms", "pools": {"default": section}}}


async def test_a_pod_is_removed_when_no_worker_has_a_request_on_it(tmp_path: Path) -> None:
    file = tmp_path / "orders"
    async with host(2, pods=2, config=SLOW, **policy(file, low=2)) as it:
        async with held(it.sim.pods):
            tasks = [asyncio.create_task(it.chat(f"question {number}", tokens=100)) for number in range(8)]
            await until(lambda: it.in_flight() == 8)
            await it.supervisor.reload(configured(it.sim, **policy(file)))
            await until(lambda: len(it.supervisor.fleet.draining) == 1)
            (victim,) = it.supervisor.fleet.draining
            assert victim.load.requests > 0
            assert not file.exists()
        await asyncio.gather(*tasks)
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        assert victim.load.requests == 0
        assert json.loads(file.read_text()) == ["1", victim.name]
        for number in range(6):
            assert await it.chat(f"another one {number}") != victim.name


async def test_the_pod_with_fewer_cached_blocks_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "orders"
    async with host(2, pods=2, **policy(file, low=2)) as it:
        kept = await it.chat("the same words " * 100)
        pool = it.supervisor.autoscaling.pools["default"]
        await until(lambda: any(replica.cached_blocks for replica in pool.replicas("vllm")))
        assert [replica.name for replica in pool.replicas("vllm") if replica.cached_blocks] == [kept]
        await it.supervisor.reload(configured(it.sim, **policy(file)))
        await until(lambda: file.exists() and file.read_text().endswith("\n"))
        assert json.loads(file.read_text()) == ["1", *({"pod-0", "pod-1"} - {kept})]


async def test_signals_of_workers_are_summed() -> None:
    async with host(2, pods=2, **policy()) as it:
        for number in range(10):
            await it.chat(f"question {number}")
        counted = "kvlane_autoscale_time_to_first_token_seconds_count"
        assert sum((await it.samples(counted)).values()) == 10
        await until(lambda: len(it.supervisor.autoscaling.pools["default"].loop.history) > 2)
        found = await it.admin("GET", POOL)
        assert found["roles"]["vllm"]["signals"]["ttft"] > 0
        assert await it.samples("kvlane_autoscale_desired_replicas") == {
            'kvlane_autoscale_desired_replicas{pool="default",role="vllm"}': 1.0
        }


async def test_all_pools_are_paused_together() -> None:
    async with (
        SimFleet(1, SimConfig(time_scale=20)) as sim,
        Supervisor(configured(sim, **policy()), 1) as supervisor,
    ):
        supervisor.autoscaling.pause_all()
        loop = supervisor.autoscaling.pools["default"].loop
        decisions = len(loop.history)
        await until(lambda: len(loop.history) > decisions + 1)
        assert loop.latest is not None
        assert loop.latest.mode == "paused"
