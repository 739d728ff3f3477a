"""Workers in processes of their own, as one proxy."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.cluster import workers
from proxy.cluster.messages import BROKER
from proxy.cluster.replica import new_id
from proxy.cluster.supervisor import Supervisor
from proxy.cluster.transport import Broker
from proxy.cluster.workers import KILL_SILENT_AFTER, SILENT_AFTER, Child, StartFailed
from proxy.core.errors import ConfigError
from proxy.core.ports import ManualClock
from proxy.core.tasks import Tasks
from proxy.lab.sim import SimConfig, SimFleet
from proxy.lab.sim.config import StepTiming
from proxy.settings import from_mapping
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.host import CHAT, Host, configured, host, question
from tests.helpers.cluster.replicas import bare_replica
from tests.helpers.scenarios.stack import BY_LOAD
from tests.helpers.waiting import PATIENCE, until

BY_PREFIX = {
    "plugins": [{"type": "approx-prefix-cache-producer"}, {"type": "prefix-cache-scorer"}],
    "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "prefix-cache-scorer"}]}],
}

SLOW = SimConfig(timing=StepTiming(base=0.05))
"""Twenty tokens a second."""


async def stream(session: aiohttp.ClientSession, host_: Host, tokens: int) -> int:
    """The events of a complete response."""
    async with session.post(host_.url + CHAT, json=question("slow", tokens, stream=True)) as response:
        response.raise_for_status()
        return (await response.read()).count(b"data: ")


async def test_two_workers_behave_as_one_proxy() -> None:
    async with host(2, **BY_LOAD) as it:
        response = await asyncio.gather(*(it.chat(f"Question {number}", 2) for number in range(40)))
        assert len(response) == 40
        decided = await it.samples("kvlane_scheduling_duration_seconds_count")
        assert decided == {"kvlane_scheduling_duration_seconds_count": 40}
        assert await it.samples("kvlane_workers") == {"kvlane_workers": 2}
        lag = await it.samples("kvlane_event_loop_lag_seconds")
        assert set(lag) == {f'kvlane_event_loop_lag_seconds{{worker="{who}"}}' for who in ("supervisor", "0", "1")}

        pods = (await it.admin("GET", "/admin/pods"))["pods"]
        assert [pod["name"] for pod in pods] == ["pod-0", "pod-1"]
        assert (await it.admin("GET", "/readyz"))["ready"]

        await _operators_reach_every_worker(it)


@pytest.mark.smoke
async def test_all_workers_know_the_prefixes_of_one_worker() -> None:
    """By a profile in which nothing but the prefix decides; the default one weighs it against a prefill that takes no
    time here."""
    async with host(2, scheduling=BY_PREFIX) as it:
        await _one_prompt_goes_to_one_pod(it)


async def _operators_reach_every_worker(it: Host) -> None:
    await it.admin("POST", "/admin/pods/pod-0/drain")
    await _goes_to(it, {"pod-1"})
    await it.admin("POST", "/admin/pods/pod-0/undrain")
    await it.admin("DELETE", "/admin/pods/pod-1")
    await _goes_to(it, {"pod-0"})
    await until(lambda: it.supervisor.fleet.get("pod-1") is None)
    await it.admin("POST", "/admin/pods", {"url": it.sim.urls[1], "name": "back"})
    await _goes_to(it, {"pod-0", "back"})


async def _goes_to(it: Host, pods: set[str]) -> None:
    """Wait until all workers use these pods: many requests all go to them, and each pod gets some.

    The questions are new each time, because known ones go to the pods that have their prefixes."""
    fresh = itertools.count()
    async with asyncio.timeout(60):
        while set(await asyncio.gather(*(it.chat(f"{pods}: question {next(fresh)}", 1) for _ in range(20)))) != pods:
            await asyncio.sleep(0.05)


async def _one_prompt_goes_to_one_pod(it: Host) -> None:
    """Whichever worker it reaches: the prefix is known to all."""
    document = "The pod holds a prefix. " * 300
    first = await it.chat(document)
    async with asyncio.timeout(PATIENCE):
        while len(set(await _index_blocks(it))) != 1:
            await asyncio.sleep(0.01)
    assert min(await _index_blocks(it)) > 20
    assert {await it.chat(document + f"Question {number}?") for number in range(12)} == {first}


async def _index_blocks(it: Host) -> list[float]:
    """Of each worker."""
    blocks = await it.samples("kvlane_prefix_index_blocks")
    return [blocks[f'kvlane_prefix_index_blocks{{worker="{worker}"}}'] for worker in (0, 1)]


async def test_a_host_is_ready_when_all_of_its_workers_are() -> None:
    """What reaches the port of the other one waits until that one serves."""
    async with SimFleet(1) as sim:
        supervisor = Supervisor(configured(sim), 2)
        async with Tasks() as tasks, aiohttp.ClientSession() as http:
            start = tasks.start(supervisor.__aenter__(), "start")
            await until(lambda: hasattr(supervisor, "_workers") and len(supervisor.pids) == 2)
            late = max(supervisor.pids)
            os.kill(late, signal.SIGSTOP)
            try:
                await until(lambda: supervisor.workers_serving == 1)
                await until(lambda: supervisor.fleet.ready)
                async with http.get(f"http://127.0.0.1:{supervisor.admin_port}/readyz") as response:
                    assert response.status == 503
                    assert (await response.json())["workers"] == {"serving": 1, "total": 2}
            finally:
                os.kill(late, signal.SIGCONT)
            await start
            async with http.get(f"http://127.0.0.1:{supervisor.admin_port}/readyz") as response:
                assert response.status == 200
            await supervisor.__aexit__(None, None, None)


async def test_a_worker_with_a_blocked_event_loop_is_replaced_and_its_clients_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "SILENT_AFTER", SILENT_AFTER)
    async with host(2) as it:
        await it.chat("warm")
        victim = min(it.supervisor.pids)
        os.kill(victim, signal.SIGSTOP)
        waiting = [asyncio.create_task(it.chat(f"Waits {number}")) for number in range(40)]
        await until(lambda: it.supervisor.workers_serving == 1)
        assert (await it.admin("GET", "/readyz"))["workers"] == {"serving": 1, "total": 2}
        assert await it.samples("kvlane_workers") == {"kvlane_workers": 1}
        monkeypatch.setattr(workers, "KILL_SILENT_AFTER", KILL_SILENT_AFTER)
        await until(lambda: victim not in it.supervisor.pids and it.supervisor.workers_serving == 2)
        assert len(await asyncio.gather(*waiting)) == 40
        assert (await it.admin("GET", "/readyz"))["workers"] == {"serving": 2, "total": 2}


async def a_worker(clock: ManualClock) -> tuple[workers.Workers, Child]:
    """Workers with one process, which is not ready."""
    broker = Broker(bare_replica(new_id(BROKER), clock), lambda worker: None)
    them = workers.Workers(broker, clock, Catalogue("test"))
    child = them._seated[0] = Child(1, 0, await asyncio.create_subprocess_exec("sleep", "600"), clock.now())
    return them, child


async def test_a_worker_that_hangs_during_its_start_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "HANGS_AFTER", 60.0)
    them, child = await a_worker(clock := ManualClock())
    clock.advance(100.0)
    them.check(late=90.0)
    clock.advance(40.0)
    them.check()
    assert child._process.returncode is None
    clock.advance(10.0)
    them.check()
    assert await child._process.wait() == -signal.SIGKILL


async def test_a_suspended_supervisor_does_not_replace_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SILENT_AFTER", SILENT_AFTER)
    monkeypatch.setattr(workers, "KILL_SILENT_AFTER", KILL_SILENT_AFTER)
    them, child = await a_worker(clock := ManualClock())
    process = child._process
    child.ready.set()
    clock.advance(60.0)
    them.check(late=59.0)
    assert them.number_serving == 1
    clock.advance(SILENT_AFTER)
    them.check()
    assert (them.number_serving, process.returncode) == (0, None)
    clock.advance(KILL_SILENT_AFTER)
    them.check()
    assert await process.wait() == -signal.SIGKILL


async def test_a_killed_worker_resets_no_client_in_its_accept_queue_and_is_replaced() -> None:
    async with host(2) as it:
        await it.chat("warm")
        before = set(it.supervisor.pids)
        victim = min(before)
        os.kill(victim, signal.SIGSTOP)
        waiting = [asyncio.create_task(it.chat(f"Waits {number}")) for number in range(40)]
        await until(lambda: sum(task.done() for task in waiting) >= 5)
        await asyncio.sleep(0.5)
        assert sum(not task.done() for task in waiting) >= 5, "no request was in the queue of the suspended worker"
        os.kill(victim, signal.SIGKILL)
        await until(lambda: victim not in it.supervisor.pids and it.supervisor.workers_serving == 2)
        assert len(await asyncio.gather(*waiting)) == 40
        assert await it.samples("kvlane_worker_restarts_total") == {"kvlane_worker_restarts_total": 1}
        assert len(set(it.supervisor.pids) & before) == 1
        pods = [await it.chat("After that") for _ in range(10)]
        assert len(pods) == 10


async def test_requests_in_flight_of_a_killed_worker_are_dropped_and_its_counters_are_kept() -> None:
    async with host(1, config=SLOW) as it, aiohttp.ClientSession() as session:
        await it.chat("first", 1)
        await until(lambda: it.in_flight() == 0)
        counted = await it.samples("kvlane_requests_total")
        cut = asyncio.create_task(stream(session, it, 200))
        await until(lambda: it.in_flight() == 1)
        (pid,) = it.supervisor.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await cut
        await until(lambda: it.in_flight() == 0)
        await until(lambda: it.supervisor.workers_serving == 1)
        assert await it.samples("kvlane_requests_total") == counted
        assert sum(counted.values()) == 1


@pytest.mark.parametrize("listen", [{}, {"keepAlive": "10m"}])
async def test_a_reload_interrupts_no_request_and_replaces_workers_only_if_needed(listen: dict[str, Any]) -> None:
    async with (
        host(2, pods=1, config=SLOW, **BY_LOAD) as it,
        SimFleet(1, SLOW) as extra,
        aiohttp.ClientSession() as session,
    ):
        long = [asyncio.create_task(stream(session, it, 60)) for _ in range(4)]
        await until(lambda: it.in_flight() == 4)
        before = set(it.supervisor.pids)
        settings = configured(it.sim, **BY_LOAD)
        more = {"static": [{"url": it.sim.urls[0], "name": "pod-0"}, {"url": extra.urls[0], "name": "extra"}]}
        changed = {**settings.given, "pods": more, "listen": {**settings.given["listen"], **listen}}
        assert await it.supervisor.reload(from_mapping(changed)) == []
        assert it.supervisor.workers_serving == 2
        assert {pod["name"] for pod in (await it.admin("GET", "/admin/pods"))["pods"]} == {"pod-0", "extra"}
        await _goes_to(it, {"pod-0", "extra"})
        assert [events for events in await asyncio.gather(*long) if events < 60] == []
        await until(lambda: len(it.supervisor.pids) == 2)
        assert set(it.supervisor.pids).isdisjoint(before) is bool(listen)
        async with asyncio.timeout(PATIENCE):  # a worker that leaves tells what it counted last
            while sum((await it.samples("kvlane_requests_total")).values()) not in range(24, 4000, 20):
                await asyncio.sleep(0.05)


async def test_no_request_is_lost_while_workers_change_and_are_replaced() -> None:
    async with host(2) as it:
        given, stop, served = configured(it.sim).given, asyncio.Event(), 0

        async def ask(client: int) -> None:
            nonlocal served
            for number in itertools.count():
                if stop.is_set():
                    return
                await it.chat(f"{client}: question {number}", 2)
                served += 1

        clients = [asyncio.create_task(ask(client)) for client in range(6)]
        for attempts, keep_alive in ((2, "10m"), (4, "10m"), (5, "11m"), (6, "11m")):
            changed = {**given, "reliability": {"retries": {"attempts": attempts}}}
            await it.supervisor.reload(
                from_mapping({**changed, "listen": {**given["listen"], "keepAlive": keep_alive}})
            )
        stop.set()
        await asyncio.gather(*clients)
        assert served > 50


async def test_workers_apply_shared_settings_in_place_and_keep_their_state() -> None:
    document = "The pod holds a prefix. " * 300
    async with host(2, pods=3) as it:
        first = await it.chat(document)
        pids = set(it.supervisor.pids)
        given = configured(it.sim).given
        producer = {"type": "approx-prefix-cache-producer", "parameters": {"maxBytes": "64MiB"}}
        scheduling = {"plugins": [producer, {"type": "prefix-cache-scorer"}]}
        changed = {**given, "scheduling": scheduling, "models": {"aliases": {"best": "sim"}}}
        result = await it.admin("POST", "/admin/config", changed)
        assert result["number"] == 2
        assert result["needsRestart"] == []
        assert {await it.chat(document + f"Question {number}?") for number in range(12)} == {first}
        assert await it.samples("kvlane_config_version") == {"kvlane_config_version": 2}
        async with aiohttp.ClientSession() as session:
            for _ in range(8):
                async with session.post(it.url + CHAT, json={**question("Hello"), "model": "best"}) as response:
                    assert response.status == 200
        assert set(it.supervisor.pids) == pids
        await it.admin("POST", "/admin/config/rollback")
        async with (
            aiohttp.ClientSession() as session,
            session.post(it.url + CHAT, json={**question("Hello"), "model": "best"}) as response,
        ):
            assert response.status == 404


async def test_a_reload_that_one_worker_refuses_is_rolled_back_by_all(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: a, key: secret-key}]")
    async with host(2) as it:
        pids = set(it.supervisor.pids)
        changed = from_mapping({**configured(it.sim).given, "security": {"apiKeysFile": str(keys)}})
        victim = min(pids)
        os.kill(victim, signal.SIGSTOP)
        reload = asyncio.create_task(it.supervisor.reload(changed))
        await asyncio.sleep(1.0)
        assert not reload.done()
        keys.unlink()
        os.kill(victim, signal.SIGCONT)
        with pytest.raises(ConfigError, match="a worker cannot serve with it"):
            await reload
        for _ in range(10):
            await it.chat("No key is needed")
        assert set(it.supervisor.pids) == pids


async def test_the_successor_of_a_crashed_worker_has_the_reloaded_settings() -> None:
    async with host(1) as it:
        changed = from_mapping({**configured(it.sim).given, "models": {"aliases": {"best": "sim"}}})
        await it.supervisor.reload(changed)
        (pid,) = it.supervisor.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: it.supervisor.workers_serving == 1 and it.supervisor.pids != [pid])
        async with (
            aiohttp.ClientSession() as session,
            session.post(it.url + CHAT, json={**question("Hello"), "model": "best"}) as response,
        ):
            assert response.status == 200


async def test_workers_that_do_not_start_are_an_error_and_leave_no_process() -> None:
    async with SimFleet(1) as sim:
        settings = configured(sim)
        unreadable = replace(settings, source={**settings.source, "listen": {"port": "none"}})
        with pytest.raises(StartFailed, match="worker 0"):
            async with Supervisor(unreadable, 1):
                pass
