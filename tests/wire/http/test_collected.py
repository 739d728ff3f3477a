"""Responses of pods for the next stage: collected, with the client's headers and nothing for the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import (
    BadGateway,
    ConnectFailed,
    Declined,
    Disconnected,
    InvalidResponse,
    Reason,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import ClientRequest, Clock, ManualClock, Relay, SystemClock
from proxy.core.request import InferenceRequest
from proxy.http.upstream import pool
from proxy.http.upstream.connection import ResponseMeter
from tests.helpers.http.support import CHAT, Pod, Received, Rig, answering, chunk, plain, post, rig
from tests.helpers.ports import full_address
from tests.helpers.waiting import PATIENCE, until
from tests.wire.http.test_failures import breaking_off, closed_port, silent

RESPONSE = b'{"kv_transfer_params":{"remote_engine_id":"e"},"usage":{"prompt_tokens":9,"completion_tokens":1}}'


@dataclass
class Collecting:
    """What a gateway does that asks one pod first, and passes on what the other one says."""

    first: Endpoint
    second: Endpoint
    seconds: float = 5.0
    headers: list[tuple[str, str]] = field(default_factory=list)
    attempt: Attempt | None = None
    body: bytes | None = None
    error: BaseException | None = None

    async def serve(self, client_request: ClientRequest, relay: Relay) -> None:
        request = InferenceRequest(
            client_request.id, client_request.path, "m", body=b'{"max_tokens":1}', headers=client_request.headers
        )
        self.attempt = attempt = self._attempt(request, self.first)
        attempt.upstream_headers += self.headers
        try:
            self.body = await relay.collect(attempt, self.seconds)
        except BaseException as error:
            self.error = error
            if not isinstance(error, UpstreamFailed):
                raise
        try:
            await relay.relay(self._attempt(request, self.second))
        except UpstreamFailed as error:
            raise BadGateway("nobody answered") from error

    def _attempt(self, request: InferenceRequest, pod: Endpoint) -> Attempt:
        return Attempt(request, Decision(pod), pod, 0, SystemClock().now())


@asynccontextmanager
async def collecting(
    first: Pod | Endpoint,
    seconds: float = 5.0,
    headers: tuple[tuple[str, str], ...] = (),
    clock: Clock | None = None,
) -> AsyncIterator[tuple[Rig, Collecting]]:
    endpoint = first.endpoint if isinstance(first, Pod) else first
    async with Pod(answering(plain(b'{"second":1}'))) as second, rig(second, clock=clock) as port:
        gateway = Collecting(endpoint, second.endpoint, seconds, list(headers))
        port.gateway.serve = gateway.serve  # type: ignore[method-assign]
        yield port, gateway


@pytest.mark.parametrize(
    "raw",
    [
        plain(RESPONSE),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + chunk(RESPONSE[:30])
        + chunk(RESPONSE[30:])
        + b"0\r\n\r\n",
    ],
)
async def test_the_response_is_collected_and_the_client_gets_only_the_next_one(raw: bytes) -> None:
    async with Pod(answering(raw)) as pod, collecting(pod) as (port, gateway):
        seen = await port.ask(post())
        assert seen.json() == {"second": 1}
        assert gateway.body == RESPONSE
        assert gateway.attempt is not None
        assert gateway.attempt.ending is Ending.COMPLETE
        assert gateway.attempt.status == 200
        assert gateway.attempt.usage == Usage(9, 1)


async def test_the_pod_gets_the_clients_headers_and_the_given_body() -> None:
    async with Pod(answering(plain(RESPONSE))) as pod, collecting(pod) as (port, _):
        await port.ask(post("/v1/chat/completions", b'{"model":"m"}', "authorization: Bearer k", "x-request-id: r-7"))
        (received,) = pod.requests
        assert received.all(b"authorization") == [b"Bearer k"]
        assert received.all(b"x-request-id") == [b"r-7"]
        assert received.all(b"content-length") == [b"16"]


async def test_a_given_id_replaces_the_clients() -> None:
    headers = (("x-request-id", "___prefill_addr_p___r-7"),)
    async with Pod(answering(plain(RESPONSE))) as pod, collecting(pod, headers=headers) as (port, _):
        await port.ask(post("/v1/chat/completions", b'{"model":"m"}', "x-request-id: r-7"))
        (received,) = pod.requests
        assert received.all(b"x-request-id") == [b"___prefill_addr_p___r-7"]


async def test_a_rejected_request_is_no_failure_of_the_pod_and_its_error_is_returned() -> None:
    fault = plain(b'{"error":{}}').replace(b"200 OK", b"400 Bad Request")
    async with Pod(answering(fault)) as pod, collecting(pod) as (port, gateway):
        await port.ask(post())
        assert (gateway.body, gateway.error) == (b'{"error":{}}', None)
        assert gateway.attempt is not None
        assert (gateway.attempt.status, gateway.attempt.ending) == (400, Ending.COMPLETE)


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"503 Service Unavailable", b"500 Oh"])
async def test_a_refusal_of_the_pod_has_its_status(status: bytes) -> None:
    async with Pod(answering(plain(b"busy").replace(b"200 OK", status))) as pod, collecting(pod) as (port, gateway):
        seen = await port.ask(post())
        assert seen.json() == {"second": 1}
        assert isinstance(gateway.error, Declined)
        assert gateway.error.status == int(status[:3])
        assert gateway.attempt is not None
        assert gateway.attempt.ending is Ending.UPSTREAM_FAILED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}'),
        ("/v1/messages", b'{"id":"c","type":"message","content":[],"model":"m"}'),
    ],
)
async def test_a_response_that_the_engine_aborted_is_a_failure(path: str, body: bytes) -> None:
    async with Pod(answering(plain(body))) as pod, collecting(pod) as (port, gateway):
        await port.ask(post(path))
        assert isinstance(gateway.error, UpstreamFailed)
        assert gateway.attempt is not None
        assert gateway.attempt.ending is Ending.UPSTREAM_FAILED


async def test_failures_are_reported_as_for_any_attempt() -> None:
    async with collecting(closed_port()) as (port, gateway):
        await port.ask(post())
        assert isinstance(gateway.error, ConnectFailed)
    async with Pod(breaking_off(plain(RESPONSE)[:-9])) as pod, collecting(pod) as (port, gateway):
        await port.ask(post())
        assert isinstance(gateway.error, Disconnected)
    async with Pod(answering(b"nonsense\r\n\r\n")) as pod, collecting(pod) as (port, gateway):
        await port.ask(post())
        assert isinstance(gateway.error, InvalidResponse)


@pytest.mark.parametrize("fields", [b"connection: upgrade\r\nupgrade: websocket\r\n", b"", b"content-length: 5\r\n"])
@pytest.mark.parametrize("behind", [b"", b"bytes of another protocol"])
async def test_a_pod_that_switches_protocols_unasked_is_closed_and_the_request_goes_on(
    fields: bytes, behind: bytes
) -> None:
    async def switching(request: Received) -> None:
        await request.body()
        await request.send(b"HTTP/1.1 101 Switching Protocols\r\n%b\r\n%b" % (fields, behind))
        await asyncio.wait_for(request.gone(), PATIENCE)
        request.break_off()

    async with Pod(switching) as pod, collecting(pod) as (port, gateway):
        for number in (1, 2):
            assert (await port.ask(post())).json() == {"second": 1}
            assert isinstance(gateway.error, InvalidResponse)
            assert gateway.attempt is not None
            assert gateway.attempt.ending is Ending.UPSTREAM_FAILED
            assert pod.connections == number


async def test_a_response_without_a_body_or_a_length_is_whole_at_its_head() -> None:
    async with Pod(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as pod, collecting(pod) as (port, gateway):
        assert (await port.ask(post())).json() == {"second": 1}
        assert (gateway.body, gateway.error) == (b"", None)


@pytest.mark.parametrize("owner", [pool.Collected, ResponseMeter])
async def test_an_error_while_a_response_is_handled_ends_the_request(
    owner: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(owner, "finished" if owner is pool.Collected else "finish_at_once", breaks)
    async with Pod(answering(plain(RESPONSE))) as pod, collecting(pod) as (port, gateway):
        seen = await port.ask(post())
        assert (seen.status, seen.json()["error"]["type"]) == (500, "internal_server_error")
        assert isinstance(gateway.error, ZeroDivisionError)
        assert [ended.outcome for ended in port.ended] == [Reason.INTERNAL]
        (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert record.exc_info is not None
        monkeypatch.undo()
        assert (await port.ask(post())).json() == {"second": 1}


async def test_an_error_while_a_response_is_awaited_ends_the_request_and_the_pod_sees_it_leave(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = asyncio.Event()

    async def slow(request: Received) -> None:
        await silent(request)
        left.set()

    def breaks(attempt: Attempt, silent_since: float) -> str:
        raise ZeroDivisionError

    async with Pod(slow) as pod, collecting(pod) as (port, _):
        port.server.use(replace(port.server.config, reason_to_give_up=breaks))
        assert (await port.ask(post())).status == 500
        await asyncio.wait_for(left.wait(), PATIENCE)
        assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_request_that_is_cancelled_by_the_proxy_before_it_is_connected_is_evicted() -> None:
    with full_address() as (host, number):
        async with collecting(Endpoint("full", f"http://{host}:{number}")) as (port, gateway), port.client() as client:
            client.send(post())
            await until(lambda: gateway.attempt is not None)
            await port.server.stop(grace=0.05)
            seen = await client.until_closed()
            assert (seen.status, seen.all("x-kvlane-reason")) == (503, ["rejected-shutting-down"])
            assert gateway.attempt is not None
            assert gateway.attempt.ending is Ending.EVICTED


async def test_an_overlong_response_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "LONGEST", 1000)

    async def endless(request: Received) -> None:
        await request.body()
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n", *[b"x" * 999] * 3, pause=0.01)
        await request.gone()

    async with Pod(endless) as pod, collecting(pod) as (port, gateway):
        await port.ask(post())
        assert isinstance(gateway.error, InvalidResponse)


async def test_a_pod_that_times_out_sees_the_request_end() -> None:
    left = asyncio.Event()

    async def slow(request: Received) -> None:
        await silent(request)
        left.set()

    async with Pod(slow) as pod, collecting(pod, seconds=0.05) as (port, gateway):
        seen = await port.ask(post())
        assert seen.json() == {"second": 1}
        assert isinstance(gateway.error, UpstreamTimedOut)
        assert gateway.attempt is not None
        assert gateway.attempt.ending is Ending.TIMED_OUT
        await asyncio.wait_for(left.wait(), PATIENCE)


async def test_a_pod_given_up_while_it_computes_sees_the_request_end() -> None:
    left = asyncio.Event()

    async def slow(request: Received) -> None:
        await silent(request)
        left.set()

    async with Pod(slow) as pod, collecting(pod) as (port, gateway):
        port.server.use(replace(port.server.config, reason_to_give_up=lambda attempt, silent_since: "its engine died"))
        seen = await port.ask(post())
        assert seen.json() == {"second": 1}
        assert isinstance(gateway.error, UpstreamFailed)
        assert str(gateway.error) == "its engine died"
        await asyncio.wait_for(left.wait(), PATIENCE)


@pytest.mark.parametrize(
    ("body", "kind"), [(b'{"error":{}}', "application/json"), (b"no such model", "text/plain; charset=utf-8")]
)
async def test_a_passed_on_error_reaches_the_client_unchanged(body: bytes, kind: str) -> None:
    fault = plain(body).replace(b"200 OK", b"400 Bad Request")
    async with Pod(answering(fault)) as pod, collecting(pod) as (port, gateway):

        async def serve(client_request: ClientRequest, relay: Relay) -> None:
            attempt = gateway._attempt(
                InferenceRequest(
                    client_request.id,
                    client_request.path,
                    "m",
                    body=client_request.body,
                    headers=client_request.headers,
                ),
                pod.endpoint,
            )
            attempt.response_headers.append(("x-kvlane-endpoint", "a"))
            relay.pass_on(attempt, await relay.collect(attempt, 5.0))

        port.gateway.serve = serve  # type: ignore[method-assign]
        seen = await port.ask(post("/v1/chat/completions", b'{"model":"m"}', "x-request-id: r-7"))
        assert (seen.status, seen.body) == (400, body)
        assert seen.all("content-type") == [kind]
        assert seen.all("x-request-id") == ["r-7"]
        assert seen.all("x-kvlane-endpoint") == ["a"]


async def test_a_client_that_leaves_ends_the_request_and_no_other_pod_is_tried() -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def slow(request: Received) -> None:
        await request.body()
        began.set()
        await request.gone()
        left.set()

    async with Pod(slow) as pod, collecting(pod) as (port, gateway):
        async with port.client() as client:
            client.send(post())
            await asyncio.wait_for(began.wait(), PATIENCE)
            client.leave()
            await asyncio.wait_for(left.wait(), PATIENCE)
        await port.until_ended()
        assert gateway.attempt is not None
        assert gateway.attempt.ending is Ending.CLIENT_GONE
        assert gateway.body is None


async def test_a_used_connection_that_was_just_closing_costs_nothing() -> None:
    async def once(request: Received) -> None:
        if request.connection == 1 and len(pod.requests) == 2:
            request.break_off()
            return
        await request.body()
        await request.send(plain(RESPONSE))

    async with Pod(once) as pod, collecting(pod, clock=ManualClock()) as (port, gateway):
        await port.ask(post())
        await port.ask(post())
        assert gateway.error is None
        assert pod.connections == 2
