"""Local responses of the data port, its refusals, and how it stops."""

from __future__ import annotations

import asyncio

from proxy.core.attempt import Ending
from proxy.core.errors import Reason
from proxy.http.settings import SecuritySettings
from tests.helpers.http.support import CHAT, SSE_HEAD, STREAMED, Pod, Received, answering, event, plain, post, rig
from tests.helpers.waiting import until


def get(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()


async def test_health_reports_whether_requests_are_accepted() -> None:
    async with rig() as port:
        for path in ("/health", "/ping"):
            assert (await port.ask(get(path))).status == 200
        port.gateway.ready = False
        seen = await port.ask(get("/health"))
        assert seen.status == 503
        assert seen.all("x-kvlane-reason") == ["rejected-no-endpoints"]


async def test_models_are_listed_and_shown() -> None:
    async with rig() as port:
        card = {"id": "org/m", "object": "model"}
        port.gateway.cards.append(card)
        assert (await port.ask(get("/v1/models"))).json() == {
            "object": "list",
            "data": [card],
        }
        for spelling in ("org/m", "org%2Fm"):
            assert (await port.ask(get("/v1/models/" + spelling))).json()["id"] == "org/m"
        seen = await port.ask(get("/v1/models/other"))
        assert seen.status == 404
        assert seen.json()["error"]["code"] == "model_not_found"


async def test_the_version_is_that_of_kvlane() -> None:
    async with rig() as port:
        seen = await port.ask(get("/version").replace(b"host: a", b"host: a\r\nx-request-id: mine"))
        assert set(seen.json()) == {"version"}
        assert seen.all("x-request-id") == ["mine"]


async def test_a_head_request_gets_no_body() -> None:
    async with rig() as port:
        seen = await port.ask(get("/version", "HEAD"))
    assert seen.raw.endswith(b"\r\n\r\n")
    assert int(seen.all("content-length")[0]) > 0


async def test_unknown_paths_are_404_and_not_relayed() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        for path in ("/metrics", "/v1/load_lora_adapter", "/sleep?level=1", "/v1/unknown", "/"):
            seen = await port.ask(post(path))
            assert seen.status == 404
            assert seen.all("x-kvlane-reason") == ["unknown-path"]
        ended = await port.until_ended(5)
        assert pod.requests == []
    assert (ended.status, ended.outcome, ended.attempt) == (404, Reason.UNKNOWN_PATH, None)


async def test_a_wrong_method_is_405_and_names_the_right_one() -> None:
    async with rig() as port:
        seen = await port.ask(get(CHAT))
        assert seen.status == 405
        assert seen.all("allow") == ["POST"]
        assert (await port.ask(get(CHAT, "PURGE"))).status == 405


async def test_stored_responses_are_reached_without_a_body() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        for method in ("GET", "DELETE"):
            assert (await port.ask(get("/v1/responses/resp_1?include=x", method))).status == 200
        assert [request.line for request in pod.requests] == [
            b"GET /v1/responses/resp_1?include=x HTTP/1.1",
            b"DELETE /v1/responses/resp_1?include=x HTTP/1.1",
        ]
        assert pod.requests[0].all(b"content-length") == []


async def test_a_head_request_to_a_pod_ends_with_the_head() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nx: 1\r\n\r\n"
    async with Pod(answering(head)) as pod, rig(pod, security=SecuritySettings(relay_paths=("/custom",))) as port:
        seen = await port.ask(get("/custom", "HEAD"))
        assert port.attempt.ending is Ending.COMPLETE
    assert seen.all("content-length") == ["100"]
    assert seen.raw.endswith(b"\r\n\r\n")


async def test_stopping_lets_streams_end_and_accepts_no_more() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, event("1"))
        await go_on.wait()
        await request.send(event("2"), b"0\r\n\r\n")

    async with Pod(script) as pod, rig(pod) as port, port.client() as busy, port.client() as idle:
        busy.send(post(body=STREAMED, close=False))
        await busy.until(b"data: 1\n\n")
        number = port.server.port
        stopping = asyncio.ensure_future(port.server.stop(grace=5))
        assert (await idle.until_closed()).raw == b""
        try:
            await asyncio.open_connection("127.0.0.1", number)
            raise AssertionError("still listening")
        except ConnectionRefusedError:
            pass
        go_on.set()
        assert (await busy.until_closed()).raw == b"\r\n" + event("2") + b"0\r\n\r\n"
        await stopping


async def test_streams_beyond_the_grace_period_are_ended_and_do_not_seem_complete() -> None:
    async def script(request: Received) -> None:
        body = await request.body()
        if body == STREAMED:
            await request.send(SSE_HEAD, event("1"))
        elif body == b"{}":
            await request.send(b"HTTP/1.1 200 OK\r\n\r\npart")
        await request.gone()

    async with (
        Pod(script) as pod,
        rig(pod) as port,
        port.client() as stream,
        port.client() as old,
        port.client() as waiting,
    ):
        stream.send(post(body=STREAMED))
        await stream.until(b"data: 1\n\n\r\n")
        old.send(post(body=b"{}", version="1.0"))
        await old.until(b"part")
        waiting.send(post(body=b'{"model":"x"}'))
        await until(lambda: len(pod.requests) == 3)
        await port.server.stop(grace=0.05)
        assert b'data: {"error"' in (await stream.until_closed()).raw
        assert (await old.until_closed()).ending == "reset"
        refused = await waiting.until_closed()
        assert (refused.status, refused.all("x-kvlane-reason")) == (503, ["rejected-shutting-down"])
        assert {attempt.ending for attempt in port.gateway.attempts} == {Ending.EVICTED}
        assert {ended.outcome for ended in port.ended} == {Ending.EVICTED, Reason.SHUTTING_DOWN}
