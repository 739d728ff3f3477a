from __future__ import annotations

import asyncio
import json
import threading
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.attempt import Ending, Usage
from proxy.core.errors import Reason
from proxy.core.ports import Identity, ManualClock
from proxy.telemetry import lines, observer
from proxy.telemetry.access_log import NO_ATTEMPT, AccessLog, Done, lines_of
from proxy.telemetry.logs import json_line
from proxy.telemetry.metrics import Counter
from proxy.telemetry.observer import BATCH
from tests.helpers.telemetry.fakes import FakeClientRequest, World
from tests.helpers.waiting import PATIENCE

FIELDS = (
    *("time", "request_id", "method", "path", "model", "endpoint", "status", "outcome", "error", "ttft", "duration"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "bytes", "attempts", "key", "tenant"),
)


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
        self.gate.wait(PATIENCE)
        if self.broken:
            raise BrokenPipeError
        self.written.append(batch[: self.at_once])
        self.wrote.set()
        return len(self.written[-1])

    @property
    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in b"".join(self.written).splitlines()]


def log_to(output: Output, lost: Counter | None = None, clock: ManualClock | None = None) -> AccessLog:
    return AccessLog(output.write, clock or ManualClock(), lost or Counter())


def logged(
    log: AccessLog,
    client_request: FakeClientRequest | None = None,
    status: int = 200,
    outcome: Ending | Reason = Ending.COMPLETE,
) -> None:
    """A request that no pod was asked for."""
    world = World(log)
    world.observer.request_ended(client_request or FakeClientRequest(), status, outcome, None, 120)
    world.observer.flush()


async def test_a_request_is_one_line_with_all_fields() -> None:
    output = Output()
    world = World(log := log_to(output, clock=ManualClock(1.5)))
    world.clock.advance(1.5)
    attempt = world.attempt_of(world.fleet.add("pod-a"), number=1)
    async with log:
        world.observer.request_ended(
            FakeClientRequest(identity=Identity("k", "acme")), 200, Ending.COMPLETE, attempt, 0
        )
        world.observer.flush()
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
            "key": "k",
            "tenant": "acme",
        }
    ]
    assert tuple(output.lines[0]) == tuple(name for name in FIELDS if name != "error")


async def test_a_refused_request_has_a_line_without_a_pod() -> None:
    output = Output()
    async with log_to(output) as log:
        logged(log, FakeClientRequest("/nothing"), 404, Reason.UNKNOWN_PATH)
    (line,) = output.lines
    assert (line["path"], line["status"], line["outcome"], line["bytes"]) == ("/nothing", 404, "unknown-path", 120)
    assert line["attempts"] == 0
    assert not {"model", "endpoint", "ttft", "prompt_tokens"} & line.keys()


async def test_the_line_of_a_refused_request_has_the_message_and_the_requested_model() -> None:
    output = Output()
    async with log_to(output) as log:
        logged(log, FakeClientRequest(refusal="No pod is ready.", model="llama"), 503, Reason.NO_ENDPOINTS)
        logged(log, FakeClientRequest(refusal="An API key is needed."), 401, Reason.UNAUTHORIZED)
    refused, unknown = output.lines
    assert (refused["model"], refused["error"]) == ("llama", "No pod is ready.")
    assert unknown["error"] == "An API key is needed."
    assert not {"model", "endpoint"} & unknown.keys()


async def test_the_line_of_a_failed_request_has_its_error_and_that_of_a_cut_response_the_error_of_its_attempt() -> None:
    output = Output()
    world = World(log := log_to(output))
    attempt = world.attempt_of(world.fleet.add("pod-a"), number=1)
    attempt.error = "it closed the connection"
    refused = FakeClientRequest(refusal="No pod is ready.", model="llama")
    async with log:
        world.observer.request_ended(refused, 503, Reason.NO_ENDPOINTS, attempt, 0)
        for outcome in (Ending.UPSTREAM_FAILED, Ending.COMPLETE):
            world.observer.request_ended(FakeClientRequest(), 200, outcome, attempt, 0)
        world.observer.flush()
    assert [line.get("error") for line in output.lines] == ["No pod is ready.", "it closed the connection", None]
    assert {line["model"] for line in output.lines} == {"sim"}


async def test_the_first_byte_of_a_continued_stream_is_that_of_its_first_attempt() -> None:
    output = Output()
    world = World(log := log_to(output))
    attempt = world.attempt_of(world.fleet.add("pod-a"), number=1)
    attempt.stream_started_at, attempt.first_byte_at = 0.5, 7.0
    async with log:
        world.observer.request_ended(FakeClientRequest(), 200, Ending.COMPLETE, attempt, 0)
        world.observer.flush()
    assert output.lines[0]["ttft"] == 0.5


async def test_prompts_and_keys_are_not_in_the_log() -> None:
    output = Output()
    client_request = FakeClientRequest(headers={"authorization": "Bearer secret"}, body=b'{"prompt": "private"}')
    async with log_to(output) as log:
        logged(log, client_request)
    assert b"secret" not in output.written[0]
    assert b"private" not in output.written[0]


async def test_characters_outside_unicode_do_not_stop_the_log() -> None:
    output = Output()
    async with log_to(output) as log:
        world = World(log)
        world.observer.request_ended(
            FakeClientRequest("/caf\udce9", id="a\nb\udcff"), 404, Reason.UNKNOWN_PATH, None, 0
        )
        world.observer.request_ended(FakeClientRequest("/next"), 200, Ending.COMPLETE, None, 0)
        world.observer.flush()
    assert [line["path"] for line in output.lines] == ["/caf\\udce9", "/next"]
    assert b"".join(output.written).count(b"\n") == 2


async def test_lines_are_written_in_batches() -> None:
    output = Output()
    async with log_to(output) as log:
        world = World(log)
        for _ in range(BATCH + 1):
            world.observer.request_ended(FakeClientRequest(), 200, Ending.COMPLETE, None, 0)
        world.observer.flush()
    assert [batch.count(b"\n") for batch in output.written] == [BATCH, 1]


async def test_a_few_lines_are_written_without_a_full_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "INTERVAL", 0.001)
    output = Output()
    async with log_to(output) as log:
        world = World(log)
        running = asyncio.get_running_loop().create_task(world.observer.run())
        world.observer.request_ended(FakeClientRequest(), 200, Ending.COMPLETE, None, 0)
        assert await asyncio.to_thread(output.wrote.wait, PATIENCE)
        running.cancel()


async def test_a_blocked_reader_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BACKLOG", 1000)
    output, lost = Output(), Counter()
    output.gate.clear()
    async with log_to(output, lost) as log:
        for _ in range(20):
            logged(log)
        output.gate.set()
    assert lost.value > 0
    assert len(output.lines) + lost.value == 20


async def test_a_reader_that_never_reads_does_not_block_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "STOP_TIMEOUT", 0.02)
    output = Output()
    output.gate.clear()
    async with asyncio.timeout(PATIENCE), log_to(output) as log:
        logged(log)
    assert output.written == []
    output.gate.set()


async def test_a_closed_reader_is_reported_once_and_its_lines_counted(caplog: pytest.LogCaptureFixture) -> None:
    output, lost = Output(), Counter()
    output.broken = True
    async with log_to(output, lost) as log:
        for _ in range(3):
            logged(log)
    assert lost.value == 3
    assert len(caplog.records) == 1


async def test_partial_writes_are_completed() -> None:
    output = Output()
    output.at_once = 7
    async with log_to(output) as log:
        for _ in range(3):
            logged(log)
    assert len(output.lines) == 3


TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(['},{"time":', ',"ttft":null', "},{", "\\"])
SECONDS = st.floats(0, 1e6)
TOKENS = st.integers(0, 2**40)
ATTEMPTS = st.tuples(
    TEXT,
    TEXT,
    st.none() | SECONDS,
    st.none() | st.builds(Usage, TOKENS, TOKENS, st.none() | TOKENS),
    TOKENS,
    st.integers(0, 9),
    TEXT,
)
RECORDS = st.tuples(
    st.tuples(TEXT, TEXT, TEXT, SECONDS, st.none() | st.builds(Identity, TEXT, TEXT)),
    SECONDS,
    st.integers(100, 599),
    st.sampled_from([*Ending, *Reason]),
    TOKENS,
    st.just(NO_ATTEMPT) | ATTEMPTS | st.tuples(TEXT, TEXT).map(lambda texts: (texts[0], *NO_ATTEMPT[1:-1], texts[1])),
)


@given(st.lists(RECORDS, min_size=1, max_size=5), SECONDS)
def test_a_batch_equals_its_single_lines(records: list[Done], epoch: float) -> None:
    batch = lines_of(records, epoch)
    assert list(map(json.loads, batch.splitlines())) == [json.loads(plain_line(record, epoch)) for record in records]
    assert [list(json.loads(line)) for line in batch.splitlines()] == [
        [name for name in FIELDS if name in json.loads(plain_line(record, epoch))] for record in records
    ]


def plain_line(record: Done, epoch: float) -> bytes:
    (request_id, method, path, received_at, identity), ended_at, status, outcome, sent, attempt_of = record
    model, endpoint, first, usage, received, attempt, error = attempt_of
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(ended_at + epoch, UTC),
        "request_id": request_id,
        "method": method,
        "path": path,
        "model": (model or None) if endpoint is None else model,
        "endpoint": endpoint,
        "status": status,
        "outcome": outcome.value,
        "error": error or None,
        "ttft": None if first is None else round((first - received_at) * 1e6) / 1e6,
        "duration": round((ended_at - received_at) * 1e6) / 1e6,
        "prompt_tokens": usage and usage.prompt_tokens,
        "completion_tokens": usage and usage.completion_tokens,
        "cached_tokens": usage and usage.cached_tokens,
        "bytes": sent or received,
        "attempts": attempt + 1,
        "key": identity and identity.name,
        "tenant": identity and identity.tenant,
    }
    return json_line({name: value for name, value in fields.items() if value is not None})
