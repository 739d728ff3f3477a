from __future__ import annotations

import asyncio
import json
import threading

import pytest

from proxy.core.clock import ManualClock
from proxy.core.exchange import Ending
from proxy.telemetry import access_log
from proxy.telemetry.access_log import FIELDS, FLUSH_LINES, AccessLog
from proxy.telemetry.instruments import Counter
from tests.telemetry.fakes import FakeCall, World


class Output:
    """Where lines go: blocks while the gate is shut, fails while it is broken, takes so many bytes at once."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.at_once: int | None = None
        self.wrote = threading.Event()

    def write(self, batch: bytes) -> int:
        self.gate.wait(5)
        if self.broken:
            raise BrokenPipeError
        self.written.append(batch[: self.at_once])
        self.wrote.set()
        return len(self.written[-1])

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in b"".join(self.written).splitlines()]


def log_to(output: Output, lost: Counter | None = None) -> AccessLog:
    return AccessLog(output.write, ManualClock(), lost or Counter())


async def test_a_request_is_one_line_with_everything_known_about_it() -> None:
    output = Output()
    world = World(log := log_to(output))
    world.clock.advance(1.5)
    exchange = world.leg(world.fleet.add("pod-a"), attempt=1)
    async with log:
        world.observer.request_ended(FakeCall(), 200, Ending.COMPLETE, exchange)
    assert output.lines == [
        {
            "time": "2023-11-14T22:13:20Z",
            "request_id": "req-1",
            "method": "POST",
            "path": "/v1/chat/completions",
            "model": "sim",
            "endpoint": "pod-a",
            "status": 200,
            "outcome": "complete",
            "ttft": 0.3,
            "duration": 1.5,
            "prompt_tokens": 100,
            "completion_tokens": 11,
            "cached_tokens": 64,
            "bytes": 5000,
            "attempts": 2,
        }
    ]
    assert tuple(output.lines[0]) == FIELDS


async def test_a_refused_request_has_a_line_without_a_pod() -> None:
    output = Output()
    async with log_to(output) as log:
        log.add(FakeCall("/nothing"), 404, "unknown-path", None, 0.001, 120)
    (line,) = output.lines
    assert (line["path"], line["status"], line["outcome"], line["bytes"]) == ("/nothing", 404, "unknown-path", 120)
    assert line["attempts"] == 0
    assert not {"model", "endpoint", "ttft", "prompt_tokens"} & line.keys()


async def test_prompts_and_keys_are_not_in_the_log() -> None:
    output = Output()
    call = FakeCall(headers={"authorization": "Bearer secret"}, body=b'{"prompt": "private"}')
    async with log_to(output) as log:
        log.add(call, 200, "complete", None, 1.0, 0)
    assert b"secret" not in output.written[0]
    assert b"private" not in output.written[0]


async def test_signs_that_are_no_unicode_do_not_stop_the_log() -> None:
    output = Output()
    async with log_to(output) as log:
        log.add(FakeCall("/caf\udce9", id="a\nb\udcff"), 404, "unknown-path", None, 0.001, 0)
        log.add(FakeCall("/next"), 200, "complete", None, 0.001, 0)
    assert [line["path"] for line in output.lines] == ["/caf\\udce9", "/next"]
    assert b"".join(output.written).count(b"\n") == 2


async def test_lines_are_written_in_batches() -> None:
    output = Output()
    async with log_to(output) as log:
        for _ in range(FLUSH_LINES + 1):
            log.add(FakeCall(), 200, "complete", None, 0.1, 0)
    assert [batch.count(b"\n") for batch in output.written] == [FLUSH_LINES, 1]


async def test_a_few_lines_do_not_wait_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "FLUSH_INTERVAL", 0.001)
    output = Output()
    async with log_to(output) as log:
        running = asyncio.get_running_loop().create_task(log.run())
        log.add(FakeCall(), 200, "complete", None, 0.1, 0)
        assert await asyncio.to_thread(output.wrote.wait, 5)
        running.cancel()


async def test_a_reader_that_stands_still_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "BACKLOG", 1000)
    output, lost = Output(), Counter()
    output.gate.clear()
    async with log_to(output, lost) as log:
        for _ in range(20):
            log.add(FakeCall(), 200, "complete", None, 0.1, 0)
            log.flush()
        output.gate.set()
    assert lost.value > 0
    assert len(output.lines) + lost.value == 20


async def test_a_reader_that_never_reads_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "STOP_TIMEOUT", 0.02)
    output = Output()
    output.gate.clear()
    async with asyncio.timeout(3), log_to(output) as log:
        log.add(FakeCall(), 200, "complete", None, 0.1, 0)
    assert output.written == []
    output.gate.set()


async def test_a_reader_that_is_gone_is_reported_once_and_its_lines_counted(caplog: pytest.LogCaptureFixture) -> None:
    output, lost = Output(), Counter()
    output.broken = True
    async with log_to(output, lost) as log:
        for _ in range(3):
            log.add(FakeCall(), 200, "complete", None, 0.1, 0)
            log.flush()
    assert lost.value == 3
    assert len(caplog.records) == 1


async def test_the_body_of_a_request_does_not_outlive_it_in_the_log() -> None:
    output = Output()
    world = World(log := log_to(output))
    exchange = world.leg(world.fleet.add("pod-a"))
    world.observer.request_ended(FakeCall(), 200, Ending.COMPLETE, exchange)
    (line,) = log._lines
    assert all(isinstance(value, str | int | float | None) for value in line)


async def test_what_is_taken_in_parts_is_written_whole() -> None:
    output = Output()
    output.at_once = 7
    async with log_to(output) as log:
        for _ in range(3):
            log.add(FakeCall(), 200, "complete", None, 0.1, 0)
    assert len(output.lines) == 3
