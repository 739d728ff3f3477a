"""Questions between the supervisor and a worker, over a link."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.cluster.messages import BROKER, RecordKind, record
from proxy.cluster.questions import MOST_OPEN, QuestionFailed, Questions
from proxy.cluster.worker import WorkerModelReads
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NotFound
from proxy.core.ports import SystemClock
from tests.helpers.waiting import PATIENCE, until
from tests.wire.cluster.test_bus import Bus, bus


@asynccontextmanager
async def question_bus() -> AsyncIterator[tuple[Bus, Questions, Questions]]:
    """The bus, and the questions of the supervisor and of worker 1."""
    async with bus() as it:
        worker = await it.join(1)
        yield it, it.broker.questions, worker.replica.questions


async def one(argument: Any) -> None:
    pass


async def echo(*arguments: Any) -> Any:
    return arguments


async def test_both_sides_send_queries_and_get_replies_in_any_order() -> None:
    async with question_bus() as (_, supervisor, worker):
        gate = asyncio.Event()

        async def late() -> str:
            await gate.wait()
            return "late"

        worker.handlers.update(echo=echo, late=late)
        supervisor.handlers["echo"] = echo
        waiting = asyncio.create_task(supervisor.ask(1, "late"))
        assert await supervisor.ask(1, "echo", "a", [1]) == ["a", [1]]
        assert await worker.ask(BROKER, "echo", "b") == ["b"]
        gate.set()
        assert await waiting == "late"


async def test_a_refusal_of_the_other_process_is_raised_at_the_caller() -> None:
    async def refuses() -> None:
        raise NotFound("There is no such decision.", param="name")

    async with question_bus() as (_, supervisor, worker):
        worker.handlers["refuses"] = refuses
        with pytest.raises(NotFound, match="no such decision") as refusal:
            await supervisor.ask(1, "refuses")
        assert (refusal.value.status, refusal.value.param) == (404, "name")


async def test_a_failing_query_has_no_reply_and_is_logged_where_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise OSError("no such file")

    async with question_bus() as (_, supervisor, worker):
        worker.handlers["fails"] = fails
        with caplog.at_level(logging.ERROR):
            with pytest.raises(QuestionFailed, match="no such file"):
                await supervisor.ask(1, "fails")
            for _ in range(100):
                with pytest.raises(QuestionFailed):
                    await supervisor.ask(1, "fails")
    assert caplog.text.count("failed to reply to a process of this host") == 1


async def test_a_worker_that_ends_leaves_no_query_waiting() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with question_bus() as (it, supervisor, worker):
        worker.handlers["never"] = never
        waiting = asyncio.create_task(supervisor.ask(1, "never"))
        await asyncio.sleep(0)
        await it.members.pop(1).replica.close()
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(QuestionFailed, match="has ended"):
                await waiting


async def test_a_worker_that_reads_nothing_is_given_up_after_the_timeout() -> None:
    async with bus() as it:
        raw = await it.join_raw(1)
        with pytest.raises(QuestionFailed, match=r"no reply within 0\.05 s"):
            await it.broker.questions.ask(1, "metrics", timeout=0.05)
        raw.close()


async def test_a_malformed_query_or_reply_costs_only_that_message() -> None:
    async with question_bus() as (it, supervisor, worker):
        worker.handlers["echo"] = echo
        send = it.members[1].replica._send_direct
        supervisor.handlers["one"] = one
        for body in (b"", b"[1,{", b'[1,"unknown",[]]', b'[1,"one"]', b'[1,"one",[1,2]]'):
            send(BROKER, record(RecordKind.QUESTION, body))
        for body in (b"[1", b'[65535,"late",null]'):
            send(BROKER, record(RecordKind.REPLY, body))
        await until(lambda: it.replica.garbled.value == 6)
        assert await supervisor.ask(1, "echo", 1) == [1]


async def test_queries_beyond_the_limit_are_refused_and_leave_no_trace() -> None:
    gate, open_at_once = asyncio.Event(), 0

    async def slow() -> str:
        nonlocal open_at_once
        open_at_once += 1
        await gate.wait()
        return "done"

    async with question_bus() as (_, supervisor, worker):
        worker.handlers["slow"] = slow
        flood = [asyncio.create_task(supervisor.ask(1, "slow")) for _ in range(MOST_OPEN + 50)]
        await until(lambda: sum(one.done() for one in flood) == 50)
        assert open_at_once == MOST_OPEN
        gate.set()
        results = await asyncio.gather(*flood, return_exceptions=True)
        assert results.count("done") == MOST_OPEN
        assert {str(one) for one in results if one != "done"} == {"too many questions at a time"}
        assert await supervisor.ask(1, "slow") == "done"
        assert not worker._open


async def test_a_worker_gets_the_models_before_the_reply_of_a_requested_read() -> None:
    async with question_bus() as (it, supervisor, worker):
        seen: list[Any] = []

        async def read(*pod: str) -> None:
            seen.append(pod)
            it.replica.publish(RecordKind.POD, b"found")

        supervisor.handlers.update({"read-models": read, "read-pod": read})
        reads = WorkerModelReads(worker, SystemClock())
        await reads.next_round()
        assert (RecordKind.POD, b"found") in it.members[1].received
        reads.read_soon(Endpoint("a"))
        await until(lambda: seen == [(), ("a",)])


async def test_requests_share_the_next_read_of_all_pods() -> None:
    async with question_bus() as (_, supervisor, worker):
        started: list[int] = []
        go_on = asyncio.Event()

        async def read() -> None:
            started.append(len(started))
            await go_on.wait()

        supervisor.handlers["read-models"] = read
        reads = WorkerModelReads(worker, SystemClock())
        first = [reads.next_round() for _ in range(300)]
        await until(lambda: started == [0])
        second = [reads.next_round() for _ in range(300)]
        await asyncio.sleep(0.02)
        assert (started, any(future.done() for future in (*first, *second))) == ([0], False)
        go_on.set()
        await asyncio.gather(*first, *second)
        assert started == [0, 1]


async def test_the_end_of_the_link_ends_reads_of_models(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()
    questions = Questions(lambda address, message: None)
    waiting = WorkerModelReads(questions, SystemClock()).next_round()
    await until(lambda: bool(questions._pending))
    questions.forget(BROKER)
    await waiting
    assert "did not read the models" in caplog.text
