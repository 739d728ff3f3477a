"""Bodies of requests: limits, patience, the process-wide budget, and uploads that are passed on as they arrive."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.attempt import Ending
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason, Saturated
from proxy.core.params import Duration, Size
from proxy.http.body import FREE_BUFFER, MemoryBudget
from tests.helpers.http.support import (
    BUFFER,
    CHAT,
    SSE_HEAD,
    Pod,
    Received,
    answering,
    chunk,
    event,
    plain,
    post,
    rig,
)
from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE, until

MIB = 1024 * 1024
SPEECH = "/v1/audio/transcriptions"
FORM = "content-type: multipart/form-data; boundary=XX"
STREAMED = Size(64 * 1024)
"""`listen.keptUpload`, so that larger forms are streamed."""


def form(size: int) -> bytes:
    start = b'--XX\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--XX\r\n'
    start += b'content-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return start + b"a" * size + b"\r\n--XX--\r\n"


def head(path: str, *fields: str) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: a", *fields, "", "")).encode()


async def test_a_declared_length_above_the_limit_is_413_before_the_body_is_read() -> None:
    async with rig(max_body=Size(1000)) as port, port.client() as client:
        client.send(head(CHAT, "content-length: 1001", "expect: 100-continue"))
        seen = await client.until(b"\r\n\r\n")
    assert seen.startswith(b"HTTP/1.1 413 ")
    assert b"x-kvlane-reason: body-too-large\r\n" in seen
    assert b"connection: close\r\n" in seen


async def test_a_chunked_body_above_the_limit_is_413_too() -> None:
    async with Pod(answering(plain())) as pod, rig(pod, max_body=Size(1000)) as port:
        for pause in (0.0, 0.02):
            async with port.client() as client:
                client.send(head(CHAT, "transfer-encoding: chunked"))
                await asyncio.sleep(pause)
                client.send(chunk(b"x" * 600) + chunk(b"x" * 600) + b"0\r\n\r\n")
                assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        assert pod.requests == []


async def test_a_body_that_does_not_arrive_is_408() -> None:
    async with rig(body_timeout=Duration(0.1)) as port, port.client() as client:
        client.send(head(CHAT, "content-length: 100") + b"abc")
        seen = await client.until(b"\r\n\r\n")
        ended = await port.until_ended()
    assert seen.startswith(b"HTTP/1.1 408 ")
    assert ended.outcome is Reason.BODY_TIMEOUT


async def test_a_slow_body_that_moves_is_read() -> None:
    async with (
        Pod(answering(plain())) as pod,
        rig(pod, body_timeout=Duration(0.3), min_body_rate=Size(10)) as port,
        port.client() as client,
    ):
        client.send(head(CHAT, "content-length: 8", "connection: close"))
        for byte in b'{"a": 1}':
            client.send(bytes([byte]))
            await asyncio.sleep(0.06)
        assert (await client.until_closed()).status == 200


async def test_a_client_that_expects_100_continue_gets_it() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        client.send(head(CHAT, "content-length: 2", "Expect: 100-continue", "connection: close"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"{}")
        assert (await client.until_closed()).status == 200
        assert pod.requests[0].all(b"expect") == []


async def test_a_body_with_broken_chunks_is_400(caplog: pytest.LogCaptureFixture) -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        client.send(head(CHAT, "transfer-encoding: chunked"))
        await asyncio.sleep(0.02)
        client.send(b"zz\r\n")
        assert (await client.until_closed()).status == 400
        assert pod.requests == []
    assert caplog.records == []


async def test_a_client_that_leaves_during_its_body_is_noticed() -> None:
    async with rig() as port:
        async with port.client() as client:
            client.send(head(CHAT, "content-length: 100") + b"abc")
            await asyncio.sleep(0.05)
            client.leave()
        ended = await port.until_ended()
        assert (ended.status, ended.outcome) == (499, Ending.CLIENT_GONE)
        assert port.server.retained == 0


@pytest.mark.parametrize("size", [1_000, 3_000_000])
async def test_beyond_the_budget_bodies_wait_for_others_to_end(size: int) -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await go_on.wait()
        await request.send(plain())

    body = b'{"x":"' + b"y" * size + b'"}'
    async with Pod(script) as pod, rig(pod, retained_bodies=Size(size + size // 2)) as port:
        first = asyncio.ensure_future(port.ask(post(body=body)))
        await until(lambda: len(pod.requests) == 1)
        second = asyncio.ensure_future(port.ask(post(body=body)))
        await asyncio.sleep(0.1)
        assert len(pod.requests) == 1
        assert port.server.budget.used == len(body)
        go_on.set()
        assert ((await first).status, (await second).status) == (200, 200)
        assert port.server.retained == 0


async def test_received_bytes_of_a_body_of_unknown_length_count() -> None:
    async with rig() as port, port.client() as client:
        client.send(head(CHAT, "transfer-encoding: chunked"))
        for total in (50_000, 100_000):
            client.send(chunk(b"x" * 50_000))
            await until(lambda total=total: port.server.retained == total)  # type: ignore[misc]
        client.leave()
        await until(lambda: port.server.retained == 0)


async def test_a_body_counts_until_its_request_has_ended() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await go_on.wait()
        await request.send(plain())

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(body=b'{"model":"m"}'))
        await until(lambda: bool(pod.requests))
        assert port.server.retained == len(b'{"model":"m"}')
        go_on.set()
        await client.until_closed()
        assert port.server.retained == 0


async def test_a_body_that_waits_too_long_for_the_budget_is_refused_with_retry_after() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.gone()

    patience = Duration(0.1)
    async with (
        Pod(script) as pod,
        rig(pod, retained_bodies=Size(10), body_timeout=patience) as port,
        port.client() as first,
    ):
        first.send(post())
        await until(lambda: bool(pod.requests))
        seen = await port.ask(post())
        assert seen.status == 429
        assert seen.all("retry-after") == ["1"]


async def test_the_budget_is_shared_in_order_and_returned_by_abandoned_bodies() -> None:
    budget = MemoryBudget(10)
    await budget.acquire(8)
    waiting = [asyncio.ensure_future(budget.acquire(size)) for size in (8, 2, 2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    await asyncio.sleep(0)
    budget.give(8)
    await asyncio.gather(*waiting[1:])
    assert budget.used == 4
    taker = asyncio.ensure_future(budget.acquire(9))
    await asyncio.sleep(0)
    budget.give(4)
    taker.cancel()
    await asyncio.gather(taker, return_exceptions=True)
    assert budget.used == 0


async def test_chunked_bodies_that_each_hold_a_part_of_the_budget_do_not_wait_for_each_other() -> None:
    piece = chunk(b"x" * 2_400_000)
    async with (
        Pod(answering(plain())) as pod,
        rig(pod, retained_bodies=Size(7_000_000)) as port,
        port.client() as first,
        port.client() as second,
    ):
        for held, client in enumerate((first, second), 1):
            client.send(head(CHAT, "transfer-encoding: chunked") + piece)
            await until(lambda held=held: port.server.budget.used == held * 2_400_000)  # type: ignore[misc]
        first.send(piece)
        await until(lambda: len(port.server.budget._growing) == 1)
        second.send(piece)
        refused = await second.until_closed()
        assert (refused.status, refused.all("retry-after")) == (429, ["1"])
        first.send(b"0\r\n\r\n")
        assert (await first.response()).startswith(b"HTTP/1.1 200")
        await until(lambda: port.server.retained == 0)


async def test_a_request_without_a_body_does_not_queue_behind_large_ones() -> None:
    async def script(request: Received) -> None:
        if await request.body():
            await request.gone()
        await request.send(plain())

    body = b'{"x":"' + b"y" * 4_000_000 + b'"}'
    async with (
        Pod(script) as pod,
        rig(pod, retained_bodies=Size(8_000_000)) as port,
        port.client() as served,
        port.client() as queued,
    ):
        served.send(post(body=body))
        await until(lambda: bool(pod.requests))
        queued.send(post(body=body))
        await until(lambda: bool(port.server.budget._waiting))
        assert (await port.ask(post(body=b""))).status == 200
        assert (
            await port.ask(b"GET /v1/responses/resp_1 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        ).status == 200
        assert port.server.budget._waiting


async def test_declared_large_bodies_that_are_not_sent_delay_no_small_ones() -> None:
    async with (
        Pod(answering(plain())) as pod,
        rig(pod, retained_bodies=Size(16 * MIB)) as port,
        port.client() as first,
        port.client() as second,
        port.client() as queued,
    ):
        for client in (first, second, queued):
            client.send(head(CHAT, f"content-length: {6 * MIB}") + b"{")
        await until(lambda: bool(port.server.budget._waiting))
        assert (await port.ask(post())).status == 200
        chunked = head(CHAT, "transfer-encoding: chunked", "connection: close") + chunk(b'{"mess') + chunk(b'ages":[]}')
        assert (await port.ask(chunked + b"0\r\n\r\n")).status == 200
        assert port.server.budget.used == 12 * MIB
        assert port.server.budget._waiting


async def test_small_bodies_have_a_reserved_part_of_the_budget() -> None:
    budget = MemoryBudget(14_000_000, for_small=2_000_000)
    await budget.acquire(10_000_000)
    large = asyncio.ensure_future(budget.acquire(4_000_000))
    await asyncio.sleep(0)
    for _ in range(2000):
        assert budget.acquire_now(1900)
    budget.used += 199_000
    small = [asyncio.ensure_future(budget.acquire(1900)) for _ in range(2)]
    await asyncio.sleep(0)
    budget.give(1900)
    await asyncio.wait_for(small[0], PATIENCE)
    assert not small[1].done()
    assert not large.done()
    budget.give(1900)
    await asyncio.wait_for(small[1], PATIENCE)
    budget.give(10_000_000)
    await asyncio.wait_for(large, PATIENCE)


async def test_a_body_larger_than_the_budget_leaves_their_part_to_small_ones() -> None:
    budget = MemoryBudget(14_000_000, for_small=2_000_000)
    assert budget.acquire_now(1900)
    assert budget.acquire_now(20_000_000)
    for _ in range(1000):
        assert budget.acquire_now(1900)
    assert not budget.acquire_now(99_000)
    budget.give(20_000_000)
    assert budget.acquire_now(10_000_000)
    assert not budget.acquire_now(3_000_000)
    budget.give(10_000_000 + 1001 * 1900)
    assert budget.acquire_now(14_000_000)
    assert budget.acquire_now(1900)


async def test_small_bodies_do_not_keep_a_large_one_from_the_whole_budget() -> None:
    budget = MemoryBudget(14_000_000, for_small=2_000_000)
    assert budget.acquire_now(1900)
    await asyncio.wait_for(budget.acquire(20_000_000), PATIENCE)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(budget.acquire(5_000_000), 0.01)


async def test_bodies_that_wait_for_each_other_are_refused_while_small_ones_pass() -> None:
    budget = MemoryBudget(14_000_000, for_small=2_000_000)
    assert budget.acquire_now(1900)
    for _ in range(2):
        await budget.acquire(6_000_000 - 1900)
    growing = [asyncio.ensure_future(budget.acquire(3_000_000, 6_000_000 - 1900)) for _ in range(2)]
    with pytest.raises(Saturated):
        await asyncio.wait_for(growing[1], PATIENCE)
    budget.give(6_000_000 - 1900)
    await asyncio.wait_for(growing[0], PATIENCE)


async def test_a_body_that_waits_for_the_budget_is_not_read_and_its_received_part_counts() -> None:
    async with (
        Pod(answering(plain())) as pod,
        rig(pod, retained_bodies=Size(8_000_000)) as port,
        port.client() as client,
    ):
        port.server.budget.used += 7_000_000
        client.send(post(body=b'{"x":"' + b"y" * 5_000_000 + b'"}'))
        await until(lambda: bool(port.server.budget._waiting))
        (client_request,) = (one.client_request for one in port.server.connections)
        assert client_request is not None
        assert client_request.payload is not None
        came = client_request.payload.total_bytes
        assert port.server.retained - 7_000_000 == came - FREE_BUFFER
        await asyncio.sleep(0.05)
        assert client_request.payload.total_bytes == came
        port.server.budget.give(7_000_000)
        assert (await client.response()).startswith(b"HTTP/1.1 200")
        await until(lambda: port.server.retained == 0)


async def test_a_waiting_body_is_refused_without_memory_for_its_received_part() -> None:
    async with rig(retained_bodies=Size(800_000)) as port:
        port.server.budget.used += 700_000
        port.server._bodies.buffers.used += 100_000
        seen = await port.ask(post(body=b'{"x":"' + b"y" * 100_000 + b'"}'))
        assert (seen.status, seen.all("retry-after")) == (429, ["1"])


async def test_a_body_that_holds_a_part_of_the_budget_precedes_those_without() -> None:
    budget = MemoryBudget(10)
    await budget.acquire(4)
    await budget.acquire(4)
    new = asyncio.ensure_future(budget.acquire(3))
    await asyncio.sleep(0)
    await asyncio.wait_for(budget.acquire(2, 4), PATIENCE)
    growing = asyncio.ensure_future(budget.acquire(4, 6))
    await asyncio.sleep(0)
    budget.give(4)
    await asyncio.wait_for(growing, PATIENCE)
    assert not new.done()
    budget.give(10)
    await asyncio.wait_for(new, PATIENCE)
    assert budget.used == 3


async def test_a_body_that_holds_all_of_the_budget_may_grow_beyond_it() -> None:
    budget = MemoryBudget(10)
    await budget.acquire(10)
    await asyncio.wait_for(budget.acquire(5, 10), PATIENCE)
    assert budget.used == 15


async def test_of_bodies_that_wait_for_each_other_the_last_are_refused_until_one_proceeds() -> None:
    budget = MemoryBudget(9)
    for _ in range(3):
        await budget.acquire(3)
    growing = [asyncio.ensure_future(budget.acquire(7, 3)) for _ in range(3)]
    with pytest.raises(Saturated):
        await asyncio.wait_for(growing[2], PATIENCE)
    budget.give(3)
    with pytest.raises(Saturated):
        await asyncio.wait_for(growing[1], PATIENCE)
    budget.give(3)
    await asyncio.wait_for(growing[0], PATIENCE)
    assert budget.used == 10


async def test_an_abandoned_body_lets_those_behind_it_proceed() -> None:
    budget = MemoryBudget(10)
    await budget.acquire(8)
    large, small = (asyncio.ensure_future(budget.acquire(size)) for size in (8, 2))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait_for(small, PATIENCE)
    assert budget.used == 10


async def test_a_body_larger_than_the_budget_gets_it_alone() -> None:
    budget = MemoryBudget(10)
    await asyncio.wait_for(budget.acquire(50), PATIENCE)
    assert budget.used == 50


async def test_a_kept_form_goes_to_the_next_pod_after_a_refusal() -> None:
    bodies: list[bytes] = []

    async def busy(request: Received) -> None:
        await request.body()
        await request.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")

    async def script(request: Received) -> None:
        bodies.append(await request.body())
        await request.send(plain())

    async with Pod(busy) as bad, Pod(script) as good, rig(bad, good) as port:
        assert (await port.ask(post(SPEECH, form(300_000), FORM))).status == 200
    assert bodies == [form(300_000)]


async def test_a_form_beyond_the_budget_is_streamed() -> None:
    async with Pod(answering(plain())) as pod, rig(pod, retained_bodies=Size(2_000_000)) as port:
        port.server.budget.used += 500_000
        assert (await port.ask(post(SPEECH, form(1_800_000), FORM))).status == 200
        assert len(port.gateway.calls[0].body) < 1_000_000


async def test_a_second_model_in_the_rest_of_a_streamed_form_ends_the_upload() -> None:
    async def script(request: Received) -> None:
        await request.gone()

    whole = form(300_000).removesuffix(b"--XX--\r\n")
    whole += b'--XX\r\ncontent-disposition: form-data; name="model"\r\n\r\nother\r\n--XX--\r\n'
    async with Pod(script) as pod, rig(pod, kept_upload=STREAMED) as port:
        seen = await port.ask(post(SPEECH, whole, FORM))
        assert seen.status == 400
        assert "more than one 'model'" in seen.json()["error"]["message"]


async def test_an_upload_is_relayed_while_it_arrives() -> None:
    got = bytearray()
    whole = form(1_000_000)

    async def script(request: Received) -> None:
        assert request.all(b"content-length") == [b"%d" % len(whole)]
        while len(got) < len(whole):
            got.extend(await request.reader.read(65536))
        await request.send(plain())

    async with Pod(script) as pod, rig(pod, kept_upload=STREAMED) as port, port.client() as client:
        client.send(head(SPEECH, FORM, f"content-length: {len(whole)}", "connection: close") + whole[:500_000])
        await until(lambda: len(got) >= 400_000)
        assert len(port.gateway.calls[0].body) < 400_000
        assert b'name="model"\r\n\r\nm\r\n' in port.gateway.calls[0].body
        client.send(whole[500_000:])
        assert (await client.until_closed()).status == 200
    assert bytes(got) == whole


async def test_a_form_with_its_file_first_is_read_until_its_model() -> None:
    bodies: list[bytes] = []

    async def script(request: Received) -> None:
        bodies.append(await request.body())
        await request.send(plain())

    file = b'--XX\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 300_000
    whole = file + b'\r\n--XX\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--XX--\r\n'
    async with Pod(script) as pod, rig(pod, kept_upload=STREAMED) as port:
        assert (await port.ask(post(SPEECH, whole, FORM))).status == 200
        assert port.gateway.calls[0].body == whole
    assert bodies == [whole]


async def test_a_chunked_upload_stays_chunked() -> None:
    bodies: list[bytes] = []

    async def script(request: Received) -> None:
        assert request.all(b"content-length") == []
        bodies.append(await request.body())
        await request.send(plain())

    whole = form(300_000)
    async with Pod(script) as pod, rig(pod, kept_upload=STREAMED) as port, port.client() as client:
        client.send(head(SPEECH, FORM, "transfer-encoding: chunked", "connection: close"))
        for start in range(0, len(whole), 50_000):
            client.send(chunk(whole[start : start + 50_000]))
            await asyncio.sleep(0.01)
        client.send(b"0\r\n\r\n")
        assert (await client.until_closed()).status == 200
    assert bodies == [whole]


async def test_an_upload_uses_no_connection_that_may_be_closing() -> None:
    async with Pod(answering(plain())) as pod, rig(pod, kept_upload=STREAMED) as port:
        await port.ask(post())
        await port.ask(post(SPEECH, form(500_000), FORM))
        assert pod.connections == 2


async def test_a_small_form_is_an_ordinary_body() -> None:
    bodies: list[bytes] = []

    async def script(request: Received) -> None:
        bodies.append(await request.body())
        await request.send(plain())

    async with Pod(script) as pod, rig(pod) as port:
        await port.ask(post(SPEECH, form(100), FORM))
    assert bodies == [form(100)]


async def test_a_pod_that_does_not_read_pauses_the_client() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await go_on.wait()
        await request.body()
        await request.send(plain())

    whole = form(60 * 2**20)
    async with Pod(script, buffer=BUFFER) as pod, rig(pod, kept_upload=STREAMED) as port, port.client() as client:
        client.send(head(SPEECH, FORM, f"content-length: {len(whole)}", "connection: close"))
        client.send(whole)
        left = -1
        while left != client.writer.transport.get_write_buffer_size():
            left = client.writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.2)
        assert left > 2**20
        go_on.set()
        assert (await client.until_closed()).status == 200


async def test_a_response_before_the_end_of_an_upload_ends_both_connections() -> None:
    gone = asyncio.Event()

    async def script(request: Received) -> None:
        await request.send(b"HTTP/1.1 401 No\r\ncontent-length: 2\r\n\r\nno")
        await request.gone()
        gone.set()

    async with Pod(script) as pod, rig(pod, kept_upload=STREAMED) as port, port.client() as client:
        client.send(head(SPEECH, FORM, "content-length: 1000000") + form(200_000))
        response = await client.response()
        await asyncio.wait_for(gone.wait(), PATIENCE)
    assert response.startswith(b"HTTP/1.1 401 No\r\n")
    assert b"connection: close\r\n" in response


async def test_an_upload_goes_to_the_next_pod_while_only_its_start_was_sent() -> None:
    unreachable = Endpoint("gone", f"http://127.0.0.1:{free_port()}")
    bodies: list[bytes] = []

    async def script(request: Received) -> None:
        bodies.append(await request.body())
        await request.send(plain())

    async with Pod(script) as pod, rig(unreachable, pod, kept_upload=STREAMED) as port:
        assert (await port.ask(post(SPEECH, form(500_000), FORM))).status == 200
    assert bodies == [form(500_000)]


async def test_a_relayed_upload_is_not_sent_twice() -> None:
    async def script(request: Received) -> None:
        await request.reader.read(200_000)
        await asyncio.sleep(0.05)
        request.break_off()

    async with (
        Pod(script) as bad,
        Pod(answering(plain())) as good,
        rig(bad, good, kept_upload=STREAMED) as port,
        port.client() as client,
    ):
        client.send(head(SPEECH, FORM, "content-length: 1000000") + form(300_000))
        response = await client.response()
        assert response.startswith(b"HTTP/1.1 502 ")
        assert good.requests == []
        assert port.attempt.ending is Ending.UPSTREAM_FAILED


async def test_an_upload_that_passes_its_deadline_is_504() -> None:
    async def script(request: Received) -> None:
        await request.gone()

    async with Pod(script) as slow, Pod(answering(plain())) as other, rig(slow, other, kept_upload=STREAMED) as port:
        port.gateway.patience = 0.3
        response = await port.ask(post(SPEECH, form(300_000), FORM, "x-request-timeout-ms: 300"))
        assert (response.status, response.all("x-kvlane-reason")) == (504, ["upstream-timed-out"])
        assert port.attempt.ending is Ending.TIMED_OUT
        assert other.requests == []


async def test_the_response_of_a_pod_that_refuses_a_running_upload_is_passed_on() -> None:
    async def script(request: Received) -> None:
        await request.reader.read(200_000)
        await asyncio.sleep(0.05)
        await request.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")

    async with (
        Pod(script) as bad,
        Pod(answering(plain())) as good,
        rig(bad, good, kept_upload=STREAMED) as port,
        port.client() as client,
    ):
        client.send(head(SPEECH, FORM, "content-length: 1000000") + form(300_000))
        response = await client.response()
        assert response.startswith(b"HTTP/1.1 503 ")
        assert response.endswith(b"\r\n\r\nbusy")
        assert good.requests == []


async def test_an_upload_that_stops_arriving_is_408_and_frees_the_pod() -> None:
    gone = asyncio.Event()

    async def script(request: Received) -> None:
        await request.gone()
        gone.set()

    async with (
        Pod(script) as pod,
        rig(pod, body_timeout=Duration(0.1), kept_upload=STREAMED) as port,
        port.client() as client,
    ):
        client.send(head(SPEECH, FORM, "content-length: 1000000") + form(200_000))
        assert (await client.response()).startswith(b"HTTP/1.1 408 ")
        await asyncio.wait_for(gone.wait(), PATIENCE)
        assert port.attempt.ending is Ending.CLIENT_GONE


async def test_a_stream_whose_upload_stops_arriving_ends_with_the_reason() -> None:
    async def script(request: Received) -> None:
        await request.send(SSE_HEAD + event("1"))
        await request.gone()

    async with (
        Pod(script) as pod,
        rig(pod, body_timeout=Duration(0.1), kept_upload=STREAMED) as port,
        port.client() as client,
    ):
        client.send(head(SPEECH, FORM, "content-length: 1000000") + form(200_000))
        seen = await client.until_closed()
        assert b"The request body did not arrive in time." in seen.body


async def test_a_chunked_upload_above_the_limit_is_413() -> None:
    async def script(request: Received) -> None:
        await request.gone()

    async with (
        Pod(script) as pod,
        rig(pod, max_body=Size(200_000), kept_upload=STREAMED) as port,
        port.client() as client,
    ):
        client.send(head(SPEECH, FORM, "transfer-encoding: chunked") + chunk(form(100_000)))
        await until(lambda: bool(pod.requests))
        client.send(chunk(b"x" * 150_000))
        assert (await client.response()).startswith(b"HTTP/1.1 413 ")


async def test_a_client_that_leaves_during_its_upload_ends_the_pods_request() -> None:
    gone = asyncio.Event()

    async def script(request: Received) -> None:
        await request.gone()
        gone.set()

    async with Pod(script) as pod, rig(pod, kept_upload=STREAMED) as port:
        async with port.client() as client:
            client.send(head(SPEECH, FORM, "content-length: 1000000") + form(200_000))
            await until(lambda: bool(pod.requests))
            client.leave()
        await asyncio.wait_for(gone.wait(), PATIENCE)
        await port.until_ended()
        assert port.attempt.ending is Ending.CLIENT_GONE
