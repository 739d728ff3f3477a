from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.lab.sim import Fault, FaultKind, Faults, SimConfig, SimPod, StepTiming
from proxy.lab.sim.faults import STATES
from tests.helpers.waiting import PATIENCE, until

COMPLETIONS = "/v1/completions"
TOKENS = 10
WHOLE_STREAM = b"data: [DONE]\n\n\r\n0\r\n\r\n"
QUIET = 0.4
"""Seconds after which a test that waits for a hang takes silence for one."""
LONG = 60.0
"""Seconds of a state that is over when the pod is stopped."""


@dataclass(frozen=True, slots=True)
class Received:
    """Everything that a client got, and how it ended: whole, closed, reset, or not at all."""

    raw: bytes
    ending: str

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def events(self) -> int:
        return self.raw.count(b"data: {")


@asynccontextmanager
async def met(kind: FaultKind, **details: Any) -> AsyncIterator[SimPod]:
    """A pod on which every request meets the fault."""
    async with SimPod(SimConfig(time_scale=20)) as pod:
        pod.faults.set([Fault(kind, **details)])
        yield pod


async def ask(pod: SimPod, *, stream: bool = True, request_id: str = "r", patience: float = 10.0) -> Received:
    reader, writer = await asyncio.open_connection(pod.host, pod.port)
    body = orjson.dumps({"prompt": "x", "max_tokens": TOKENS, "stream": stream})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nx-request-id: {request_id}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    raw, ending = b"", "closed"
    try:
        while piece := await _read(reader, 0.01 if _is_whole(raw) else patience):
            raw += piece
    except TimeoutError:
        ending = "whole" if _is_whole(raw) else "hangs"
    except ConnectionResetError:
        ending = "reset"
    finally:
        writer.close()
    return Received(raw, ending)


async def _read(reader: asyncio.StreamReader, patience: float) -> bytes:
    async with asyncio.timeout(patience):
        return await reader.read(65536)


def _is_whole(raw: bytes) -> bool:
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"\r\nContent-Length: (\d+)", head)
    if length:
        return len(body) == int(length[1])
    return body.endswith(b"\r\n0\r\n\r\n")


async def get(pod: SimPod, path: str) -> int:
    async with aiohttp.ClientSession() as client, client.get(pod.url + path) as response:
        return response.status


async def is_well(pod: SimPod) -> bool:
    with suppress(OSError, aiohttp.ClientConnectionError):
        return await get(pod, "/health") == 200 and (await ask(pod, patience=1.0)).ending == "whole"
    return False


def patience(ending: str) -> float:
    return QUIET if ending == "hangs" else 10.0


@pytest.mark.parametrize(("status", "retry_after"), [(429, 7), (500, None), (502, None), (503, 1)])
async def test_a_request_is_rejected_with_a_status(status: int, retry_after: int | None) -> None:
    async with met(FaultKind.REJECT, status=status, retry_after=retry_after) as pod:
        received = await ask(pod)
        assert (received.status, received.ending) == (status, "whole")
        header = b"Retry-After: %d\r\n" % retry_after if retry_after else b"Retry-After"
        assert (header in received.raw) == bool(retry_after)
        assert (pod.requests[0].fault, pod.requests[0].status) == ("reject", status)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("kind", "ending"),
    [(FaultKind.HANG, "hangs"), (FaultKind.RESET, "reset"), (FaultKind.FIN, "closed"), (FaultKind.MISFRAME, "hangs")],
)
async def test_before_the_head_no_byte_of_the_response_has_passed(kind: FaultKind, ending: str, stream: bool) -> None:
    async with met(kind) as pod:
        received = await ask(pod, stream=stream, patience=patience(ending))
        assert received.ending == ending
        assert b"HTTP/1.1 " not in received.raw
        await until(lambda: not pod.requests.open)
        assert pod.requests[0].cut == (kind in (FaultKind.RESET, FaultKind.FIN))
        assert pod.requests[0].aborted != pod.requests[0].cut


@pytest.mark.parametrize(
    ("kind", "ending"), [(FaultKind.HANG, "hangs"), (FaultKind.FIN, "closed"), (FaultKind.MISFRAME, "hangs")]
)
async def test_a_fault_during_a_stream_follows_some_events(kind: FaultKind, ending: str) -> None:
    async with met(kind, events=3) as pod:
        received = await ask(pod, patience=patience(ending))
        assert (received.status, received.ending, received.events) == (200, ending, 3)
        assert b"[DONE]" not in received.raw
        await until(lambda: not pod.requests.open)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reset_in_the_middle_may_discard_unread_bytes(stream: bool) -> None:
    async with met(FaultKind.RESET, events=3) as pod:
        received = await ask(pod, stream=stream)
        assert received.ending == "reset"
        assert received.events <= 3
        assert pod.requests[0].cut


async def test_a_stream_shorter_than_its_fault_still_fails() -> None:
    async with met(FaultKind.FIN, events=1_000) as pod:
        received = await ask(pod)
        assert (received.events, received.ending) == (TOKENS, "closed")
        assert b"[DONE]" not in received.raw


@pytest.mark.parametrize(("kind", "ending"), [(FaultKind.HANG, "hangs"), (FaultKind.FIN, "closed")])
async def test_in_the_middle_of_a_whole_response_half_of_it_has_passed(kind: FaultKind, ending: str) -> None:
    async with met(kind, events=1) as pod:
        received = await ask(pod, stream=False, patience=patience(ending))
        assert (received.status, received.ending) == (200, ending)
        head, _, body = received.raw.partition(b"\r\n\r\n")
        assert 0 < len(body) < int(head.partition(b"Content-Length: ")[2].split()[0])


@pytest.mark.parametrize("stream", [True, False])
async def test_malformed_chunks_come_after_valid_ones(stream: bool) -> None:
    async with met(FaultKind.MISFRAME, events=1) as pod:
        received = await ask(pod, stream=stream, patience=QUIET)
        assert received.raw.endswith(b"}\n\n\r\nso many bytes\r\n" if stream else b"\r\nso many bytes\r\n")
        assert received.ending == "hangs"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_drip_is_slow_and_complete(stream: bool) -> None:
    async with met(FaultKind.DRIP) as pod:
        received = await ask(pod, stream=stream)
        assert (received.status, received.ending) == (200, "whole")
        pod.faults.set([])
        undisturbed = await ask(pod, stream=stream)
        assert len(received.raw) == pytest.approx(len(undisturbed.raw), abs=40)
        assert received.events == undisturbed.events
        slow, fast = (record.ended - record.arrived for record in pod.requests if record.ended)
        assert slow > fast


async def test_garbage_is_not_http() -> None:
    async with met(FaultKind.GARBAGE) as pod:
        received = await ask(pod)
        assert received.ending == "closed"
        assert received.raw
        assert not received.raw.startswith(b"HTTP/")


async def test_a_corrupt_stream_has_one_malformed_event() -> None:
    async with met(FaultKind.CORRUPT, events=2) as pod:
        received = await ask(pod)
        assert received.ending == "whole"
        assert received.raw.endswith(WHOLE_STREAM)
        events = [line for line in received.raw.replace(b"\r\n", b"").split(b"\n\n") if b"data: {" in line]
        assert sum(event.count(b'"choices"') + event.count(b"data: {") != 2 for event in events) == 1


async def test_a_corrupt_response_is_half_of_its_json() -> None:
    async with met(FaultKind.CORRUPT) as pod:
        received = await ask(pod, stream=False)
        assert received.ending == "whole"
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(received.raw.partition(b"\r\n\r\n")[2])


async def test_a_full_queue_is_an_error_in_the_first_event() -> None:
    async with met(FaultKind.ERROR_FIRST) as pod:
        received = await ask(pod)
        assert (received.status, received.events, received.ending) == (200, 1, "whole")
        assert b'data: {"error":{"message":"The engine is currently busy' in received.raw
        assert received.raw.endswith(WHOLE_STREAM)
        assert (await ask(pod, stream=False)).status == 503


async def test_a_refusing_pod_finishes_its_requests() -> None:
    async with met(FaultKind.REFUSE, seconds=LONG, count=1) as pod:
        received = await ask(pod)
        assert received.events == TOKENS
        assert b"[DONE]" in received.raw
        with pytest.raises(ConnectionRefusedError):
            await ask(pod)


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind in STATES - {FaultKind.SLOW_START}])
async def test_faults_of_a_pod_end_by_themselves(kind: FaultKind) -> None:
    async with met(kind, seconds=0.05, count=1) as pod:
        await ask(pod, patience=QUIET)
        async with asyncio.timeout(PATIENCE):
            while not await is_well(pod):
                await asyncio.sleep(0.01)


async def test_a_crashed_pod_resets_all_clients_and_returns() -> None:
    async with SimPod(SimConfig(timing=StepTiming(base=0.05))) as pod:
        bystander = asyncio.ensure_future(ask(pod, request_id="bystander"))
        await until(lambda: bool(pod.requests.open))
        pod.faults.set([Fault(FaultKind.CRASH, seconds=0.1, count=1)])
        received = await ask(pod)
        assert (received.ending, (await bystander).ending) == ("reset", "reset")
        assert all(record.cut and not record.aborted for record in pod.requests)
        await until(lambda: pod.serving)
        assert (await ask(pod)).ending == "whole"


async def test_a_killed_engine_leaves_its_responses_hanging_after_it_has_come_back() -> None:
    async with met(FaultKind.KILLED, seconds=0.05, count=1) as pod:
        killed = pod.engine
        received = asyncio.ensure_future(ask(pod, request_id="hangs", patience=QUIET))
        await until(lambda: pod.engine is not killed and pod.serving)
        assert (await ask(pod)).ending == "whole"
        assert (await received).ending == "hangs"
        await until(lambda: not pod.requests.open)
        assert pod.requests[0].aborted


async def test_a_killed_pod_refuses_connections_and_lets_no_client_hang_when_it_is_stopped() -> None:
    async with met(FaultKind.KILLED, seconds=LONG) as pod:
        received = asyncio.ensure_future(ask(pod))
        await until(lambda: not pod.serving)
        with pytest.raises(ConnectionRefusedError):
            await ask(pod)
        await pod.stop()
        assert (await received).ending == "reset"


async def test_a_frozen_engine_hangs_behind_a_healthy_server() -> None:
    async with met(FaultKind.FROZEN, seconds=LONG, count=1) as pod:
        assert (await ask(pod, patience=QUIET)).ending == "hangs"
        assert await get(pod, "/health") == 200


async def test_a_pod_may_report_that_it_is_unhealthy() -> None:
    async with met(FaultKind.UNHEALTHY, seconds=LONG, count=1) as pod:
        assert await get(pod, "/health") == 200
        assert (await ask(pod)).ending == "whole"
        assert await get(pod, "/health") == 503
        assert await get(pod, "/v1/models") == 200


async def test_a_loading_pod_reports_it() -> None:
    async with met(FaultKind.LOADING, seconds=LONG, count=1) as pod:
        assert (await ask(pod)).status == 503
        assert [await get(pod, path) for path in ("/health", "/v1/models", "/metrics")] == [503, 503, 503]
        assert await get(pod, "/admin/faults") == 200


async def test_a_pod_that_shuts_down_refuses_requests_and_is_healthy() -> None:
    async with met(FaultKind.SHUTTING_DOWN, seconds=LONG, count=1) as pod:
        received = await ask(pod)
        assert received.status == 500
        assert b"cannot schedule new futures after shutdown" in received.raw
        assert await get(pod, "/health") == 200
        assert (await ask(pod, request_id="another")).status == 500
        async with (
            aiohttp.ClientSession(pod.url) as client,
            client.post("/admin/faults", json={"faults": []}) as response,
        ):
            assert response.status == 200


async def test_a_slow_start_is_slow_with_an_empty_cache() -> None:
    async with SimPod(SimConfig(time_scale=20)) as pod:
        await ask(pod)
        pod.faults.set([Fault(FaultKind.SLOW_START, factor=5.0, seconds=10.0)])
        await ask(pod)
        fast, slow = (record.ended - record.arrived for record in pod.requests if record.ended)
        assert slow > fast
        assert pod.requests[1].cached_tokens == 0


async def test_faults_are_set_over_http() -> None:
    async with SimPod() as pod, aiohttp.ClientSession(pod.url) as client:
        requested = {"seed": 3, "faults": [{"kind": "reject", "probability": 1.0, "count": 1, "status": 502}]}
        async with client.post("/admin/faults", json=requested) as response:
            assert response.status == 200
        assert [(await ask(pod)).status for _ in range(2)] == [502, 200]
        async with client.get("/admin/faults") as response:
            found = await response.json()
        assert (found["seed"], found["faults"][0]["kind"], found["faults"][0]["met"]) == (3, "reject", 1)
        async with client.get("/admin/requests") as response:
            assert [(call["fault"], call["status"]) for call in await response.json()] == [("reject", 502), (None, 200)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "explode"},
        {"kind": "reset", "probability": 1.1},
        {"kind": "reset", "events": -1},
        {"kind": "reset", "because": "why not"},
        {"kind": "reject", "status": 200},
    ],
)
async def test_invalid_faults_are_refused(wrong: dict[str, Any]) -> None:
    async with SimPod() as pod, aiohttp.ClientSession(pod.url) as client:
        async with client.post("/admin/faults", json={"faults": [wrong]}) as response:
            assert response.status == 400
        assert pod.faults.faults == ()


IDS = [f"r-{number}" for number in range(2_000)]


@given(st.integers(0, 2**32))
def test_faults_depend_on_the_seed_and_the_id_only(seed: int) -> None:
    requested = [Fault(FaultKind.RESET, 0.2), Fault(FaultKind.HANG, 0.1)]
    one, other = Faults(), Faults()
    one.set(requested, seed)
    other.set(requested, seed)
    assert {name: one.meet(name) for name in IDS} == {name: other.meet(name) for name in reversed(IDS)}
    assert one.met[0] == pytest.approx(400, abs=120)
    assert one.met[1] == pytest.approx(200, abs=90)


def test_a_fault_occurs_a_limited_number_of_times() -> None:
    faults = Faults()
    faults.set([Fault(FaultKind.RESET, count=3)])
    assert sum(faults.meet(name) is not None for name in IDS) == 3


def test_more_faults_than_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="one fault at most"):
        Faults().set([Fault(FaultKind.RESET, 0.6), Fault(FaultKind.HANG, 0.6)])
