"""Changes of all workers that fail halfway: the workers serve on, all with one configuration."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any, cast

import pytest

from proxy.cluster.messages import BROKER
from proxy.cluster.questions import QuestionFailed, Questions
from proxy.cluster.replica import new_id
from proxy.cluster.transport import Broker
from proxy.cluster.workers import Child, Workers, packed_settings
from proxy.config.reload import NotApplied
from proxy.core.ports import SystemClock
from proxy.settings import Settings, from_mapping
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.host import configured, host
from tests.helpers.cluster.replicas import bare_replica
from tests.helpers.waiting import until

START = asyncio.create_subprocess_exec

OLD, NEW, NEWER = (from_mapping({"reliability": {"retries": {"attempts": number}}}) for number in (1, 2, 3))


@contextmanager
def out_of_processes(first: int) -> Iterator[None]:
    """Inside the context, only the first starts of processes succeed."""
    left = first

    async def start(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        nonlocal left
        left -= 1
        if left < 0:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await START(*command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        yield


@pytest.mark.parametrize("started", [0, 1])
async def test_a_reload_that_cannot_start_a_worker_leaves_all_old_workers_in_use(
    started: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with host(2) as it:
        pids = set(it.supervisor.pids)
        given = configured(it.sim).given
        changed = {**given, "listen": {**given["listen"], "keepAlive": "10m"}, "models": {"aliases": {"best": "sim"}}}
        caplog.clear()
        url = f"http://127.0.0.1:{it.supervisor.admin_port}/admin/config"
        with out_of_processes(started):
            response = await it.admin_http.post(url, json=changed)
        async with response:
            assert response.status == 400
            fault = (await response.json())["error"]["problems"][0]["message"]
        why = f"failed to start worker {started}: [Errno 11] Resource temporarily unavailable"
        assert fault == f"{why}; the configuration in effect stays"
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
            f"not reloaded: {fault}"
        ]
        await until(lambda: set(it.supervisor.pids) == pids)
        assert it.supervisor.workers_serving == 2
        assert (await it.admin("GET", "/admin/config"))["version"]["number"] == 1
        for number in range(10):
            await it.chat(f"Question {number}")
        assert (await it.admin("POST", "/admin/config", changed))["number"] == 2
        await until(lambda: set(it.supervisor.pids).isdisjoint(pids))


class Processes(Workers):
    """Workers in processes that only sleep. `refused` are, by worker, the settings that it does not reload."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker, SystemClock(), Catalogue("test"))
        self.refused: Mapping[int, Settings] = {}
        self.crashing = self.leaving = 0
        """A worker that crashes when it reloads; one that has announced its end then."""
        self.serve_with: dict[int, str] = {}
        """By worker: the packed settings that it serves with."""
        broker.questions = cast(Questions, self)

    async def ask(self, worker: Any, topic: str, *arguments: Any, timeout: float | None = None) -> None:
        """As Questions do."""
        (packed,) = arguments
        if worker in (self.crashing, self.leaving):
            child = self.children[worker]
            if worker == self.leaving:
                child.leaving.set()
            os.kill(child.pid, 9)
            await child.unlinked.wait()
            raise QuestionFailed("the process has ended")
        refused = self.refused.get(worker)
        if refused is not None and packed == packed_settings(refused.source):
            raise QuestionFailed("it is refused")
        self.serve_with[worker] = packed

    async def _start_worker(self, seat: int, settings: Settings) -> Child:
        ours, theirs = socket.socketpair()
        with ExitStack() as stack, theirs:
            stack.enter_context(ours)
            process = await asyncio.create_subprocess_exec("sleep", "600", pass_fds=(theirs.fileno(),))
            stack.pop_all()
        number = next(self._numbers)
        child = self.children[number] = Child(number, seat, process, self._clock.now())
        self.serve_with[number] = packed_settings(settings.source)
        self._tasks.start(self._watch(child), "watch")
        await self._broker.attach(number, ours)
        child.ready.set()
        return child

    def settings_in_use(self) -> set[str]:
        return {self.serve_with[child.number] for child in self.seated}


@asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    """Two workers."""

    def lost(worker: int) -> None:
        them.children[worker].vanish()

    broker = Broker(bare_replica(new_id(BROKER), SystemClock()), lost)
    them = Processes(broker)
    await them.start([[], []], [[], []], OLD)
    try:
        yield them
    finally:
        await them.stop()
        await until(lambda: not broker.links)
        await asyncio.sleep(0)


async def test_a_worker_that_does_not_return_from_a_refused_reload_is_replaced() -> None:
    async with processes() as them:
        first, second = them.children
        them.refused = {first: OLD, second: NEW}
        with pytest.raises(NotApplied, match="worker 1: it is refused"):
            await them.reload(NEW)
        assert them.number_serving == 2
        assert them.settings_in_use() == {packed_settings(OLD.source)}
        assert second in [child.number for child in them.seated]
        await until(lambda: first not in them.children)


async def test_settings_that_crash_a_worker_are_refused_and_its_successor_has_the_previous_ones() -> None:
    async with processes() as them:
        them.crashing, _ = them.children
        with pytest.raises(NotApplied, match="worker 0: the process has ended"):
            await them.reload(NEW)
        await until(lambda: them.crashing not in them.children and them.number_serving == 2)
        assert them.settings_in_use() == {packed_settings(OLD.source)}


async def test_a_worker_that_leaves_during_a_reload_does_not_refuse_it() -> None:
    async with processes() as them:
        them.leaving, _ = them.children
        await them.reload(NEW)
        await until(lambda: them.leaving not in them.children and them.number_serving == 2)
        assert them.settings_in_use() == {packed_settings(NEW.source)}


async def test_a_worker_that_dies_after_a_refused_change_is_replaced_by_one_like_the_others() -> None:
    async with processes() as them:
        first, second = them.children
        them.refused = {second: NEW}
        with pytest.raises(NotApplied):
            await them.reload(NEW)
        with out_of_processes(1), pytest.raises(NotApplied, match="failed to start worker 1"):
            await them.replace(NEWER)
        await until(lambda: set(them.children) == {first, second})
        os.kill(them.children[first].pid, 9)
        await until(lambda: first not in them.children and them.number_serving == 2)
        assert them.settings_in_use() == {packed_settings(OLD.source)}
