"""The port for gateways, spoken to message by message: what an Envoy may be configured to send, and the replies."""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import grpc
import grpc.aio
import orjson
import pytest

from proxy.app import App
from proxy.config.load import load
from proxy.core.endpoint import Endpoint, update
from proxy.core.errors import ConfigError, ConnectFailed
from proxy.extproc import messages
from proxy.extproc.addresses import SUBSET_KEY, SUBSET_NAMESPACE, Addresses
from proxy.extproc.messages import BUFFERED, BUFFERED_PARTIAL, DESTINATION, FULL_DUPLEX_STREAMED, NONE, STREAMED, plain
from proxy.extproc.request import ATTRIBUTES
from proxy.flowcontrol.controller import WAITED_HEADER
from proxy.lab.sim import Fault, FaultKind, SimConfig, SimFleet
from proxy.lab.sim.config import ConnectorName
from proxy.settings import from_mapping
from tests.helpers.http.authority import Authority
from tests.helpers.scenarios.disagg import ROLES, SIM, meet, prefills, sections
from tests.helpers.scenarios.stack import BLIND, Stack, stack
from tests.helpers.waiting import PATIENCE, until

BODY = orjson.dumps({"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
CONFIG = Path(__file__).parents[3] / "config"
NO_FIELDS: Mapping[str, str] = {}
HEAD = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}


_TALKS: WeakSet[Talk] = WeakSet()
"""The talks of the current test. gRPC keeps the connection of a closed channel while a call of it is referenced, and
kvlane waits a second for it to become quiet."""


class Talk:
    """With kvlane, as a gateway."""

    def __init__(self, call: Any) -> None:
        self._call = call
        _TALKS.add(self)

    def release(self) -> None:
        del self._call

    async def say(self, **fields: Any) -> None:
        await self._call.write(messages.ProcessingRequest(**fields))

    async def hear(self) -> Any:
        async with asyncio.timeout(PATIENCE):
            return await self._call.read()

    async def status(self) -> Any:
        """Return the status of a stream that ends with an error."""
        try:
            message = await self.hear()
        except grpc.aio.AioRpcError as error:
            return error.code()
        raise AssertionError(message)

    async def head(self, mode: int = FULL_DUPLEX_STREAMED, more: Mapping[str, str] = NO_FIELDS) -> None:
        await self.say(
            request_headers={"headers": headers({**HEAD, **more})},
            protocol_config={"request_body_mode": mode, "response_body_mode": FULL_DUPLEX_STREAMED},
        )

    async def end(self) -> None:
        await self._call.done_writing()


def headers(fields: Mapping[str, str]) -> dict[str, Any]:
    return {"headers": [{"key": key, "raw_value": value.encode()} for key, value in fields.items()]}


def set_by(mutation: Any) -> dict[str, str]:
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


@asynccontextmanager
async def channel_to(port: int | None) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
        await channel.close()
        while _TALKS:
            _TALKS.pop().release()


@asynccontextmanager
async def gateway(
    settings: Mapping[str, Any] | None = None, each: Sequence[Mapping[str, Any]] = (), **own: Any
) -> AsyncIterator[tuple[Stack, Any]]:
    """kvlane before two pods, and a gRPC channel to it."""
    given = {**(settings or {}), "extproc": {"host": "127.0.0.1", "port": 0, **own}}
    async with stack(2, settings=given, each=each) as s, channel_to(s.app.picker_port) as channel:
        yield s, channel


def talk(channel: Any) -> Talk:
    process = channel.stream_stream(
        f"/{messages.SERVICE}/Process",
        messages.ProcessingRequest.SerializeToString,
        messages.ProcessingResponse.FromString,
    )
    return Talk(process())


async def health(channel: Any, service: str) -> int:
    check = channel.unary_unary(
        f"/{messages.HEALTH}/Check",
        messages.HealthCheckRequest.SerializeToString,
        messages.HealthCheckResponse.FromString,
    )
    status: int = (await check(messages.HealthCheckRequest(service=service))).status
    return status


async def test_the_destination_is_in_a_header_and_in_the_metadata() -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        await one.head(more={"x-gateway-destination-endpoint": "10.9.9.9:1", "x-prefiller-host-port": "10.9.9.9:2"})
        await one.say(request_body={"body": BODY[:10]})
        await one.say(request_body={"body": BODY[10:], "end_of_stream": True})
        reply = await one.hear()
        named = set_by(reply.request_headers.response.header_mutation)[DESTINATION]
        assert named in {pod.url.removeprefix("http://") for pod in s.pods}
        assert plain(reply.dynamic_metadata.fields) == {"envoy.lb": {DESTINATION: named}}
        assert list(reply.request_headers.response.header_mutation.remove_headers) == ["x-prefiller-host-port"]
        piece = (await one.hear()).request_body.response.body_mutation.streamed_response
        assert (piece.body, piece.end_of_stream) == (BODY, True)
        await one.end()
        await until(lambda: s.app.ledger.in_flight == 0)


MISSING = b'{"error":{"message":"The model `sim` does not exist. Models: secret-model","code":"model_not_found"}}'
KEYS = [{"name": "some", "key": "some", "models": ["sim"]}, {"name": "all", "key": "all"}]
FALLBACK = {"models": {"fallbacks": {"sim": ["other"]}}}
TWO_MODELS = [{"models": ["sim"]}, {"models": ["other"]}]


async def responses_to(
    key: str, mode: int, body: bytes, fields: Mapping[str, str] = NO_FIELDS, has_fallback: bool = False
) -> tuple[int, bytes]:
    """Return the status and the body that a client of the gateway gets when a pod responds with this body and 404."""
    more, pods = ({**BLIND, **FALLBACK}, TWO_MODELS) if has_fallback else ({}, [])
    async with gateway({"security": {"apiKeys": KEYS}, **more}, pods) as (s, channel):
        one = talk(channel)
        await one.say(
            request_headers={"headers": headers({**HEAD, "authorization": f"Bearer {key}"})},
            protocol_config={"request_body_mode": FULL_DUPLEX_STREAMED, "response_body_mode": mode},
        )
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        await one.hear()
        await one.hear()
        head = {":status": "404", "content-type": "application/json", "content-length": str(len(body)), **fields}
        status, passed = 404, b""
        await one.say(response_headers={"headers": headers(head)})
        if mode == FULL_DUPLEX_STREAMED:  # it does not wait for the reply to the head
            for at in range(0, len(body), 20):
                await one.say(response_body={"body": body[at : at + 20], "end_of_stream": at + 20 >= len(body)})
        while (reply := await one.hear()) is not grpc.aio.EOF:
            match reply.WhichOneof("kind"):
                case "immediate_response":
                    status, passed = reply.immediate_response.status.code, reply.immediate_response.body
                    break
                case "response_headers" if mode in (BUFFERED, STREAMED):
                    await one.say(response_body={"body": body, "end_of_stream": True})
                    continue
                case "response_headers" if mode == NONE:
                    passed = body
                    break
                case "response_body":
                    change = reply.response_body.response.body_mutation
                    passed += change.streamed_response.body if mode == FULL_DUPLEX_STREAMED else change.body or body
                    if mode != FULL_DUPLEX_STREAMED or change.streamed_response.end_of_stream:
                        break
        await one.end()
        await until(lambda: s.app.ledger.in_flight == 0)
        return status, passed


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED, STREAMED, NONE])
@pytest.mark.parametrize("coded", [False, True])
async def test_the_404_of_a_pod_does_not_list_models_for_a_restricted_key(mode: int, coded: bool) -> None:
    body, fields = (gzip.compress(MISSING), {"content-encoding": "gzip"}) if coded else (MISSING, {})
    status, passed = await responses_to("some", mode, body, fields)
    assert (status, orjson.loads(passed)["error"]["code"]) == (404, "model_not_found")
    assert b"secret" not in passed
    assert await responses_to("all", mode, body, fields) == (404, body)


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
async def test_a_fallback_model_cannot_serve_a_request_that_got_a_404(mode: int) -> None:
    status, passed = await responses_to("some", mode, MISSING, has_fallback=True)
    assert (status, orjson.loads(passed)["error"]["code"]) == (404, "model_not_found")
    assert b"secret" not in passed


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
async def test_a_404_of_a_pod_that_is_not_about_a_model_passes(mode: int) -> None:
    body = b'{"detail":"Not Found"}' + b" " * 20_000
    assert await responses_to("some", mode, body) == (404, body)


async def test_trailers_are_replied_to_after_the_body() -> None:
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.head()
        await one.say(request_body={"body": BODY})
        await one.say(request_trailers={})
        kinds = [(await one.hear()).WhichOneof("kind") for _ in range(3)]
        assert kinds == ["request_headers", "request_body", "request_trailers"]
        await one.say(response_headers={"headers": headers({":status": "200", "content-type": "text/event-stream"})})
        await one.say(response_body={"body": b"data: [DONE]\n\n"})
        await one.say(response_trailers={})
        kinds = [(await one.hear()).WhichOneof("kind") for _ in range(3)]
        assert kinds == ["response_headers", "response_body", "response_trailers"]


TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'


@asynccontextmanager
async def responding(mode: int, alias: str, content_type: str) -> AsyncIterator[tuple[Stack, Talk]]:
    """A gateway whose pod has begun its response to a request for this name of the model."""
    async with gateway({"models": {"aliases": {"nice": "sim"}}}) as (s, channel):
        one = talk(channel)
        await one.say(
            request_headers={"headers": headers(HEAD)},
            protocol_config={"request_body_mode": FULL_DUPLEX_STREAMED, "response_body_mode": mode},
        )
        asks = orjson.dumps({**orjson.loads(BODY), "model": alias, "stream": content_type == "text/event-stream"})
        await one.say(request_body={"body": asks, "end_of_stream": True})
        assert [(await one.hear()).WhichOneof("kind") for _ in range(2)] == ["request_headers", "request_body"]
        await one.say(response_headers={"headers": headers({":status": "200", "content-type": content_type})})
        assert (await one.hear()).WhichOneof("kind") == "response_headers"
        yield s, one


async def passed(one: Talk, mode: int, came: bytes) -> bytes:
    """Return what the client gets by the reply to a piece of the body."""
    reply = (await one.hear()).response_body.response
    change = reply.body_mutation
    return change.streamed_response.body if mode == FULL_DUPLEX_STREAMED else change.body or came


async def ended(s: Stack, ending: str) -> bool:
    await until(lambda: s.app.ledger.in_flight == 0)
    s.app.observer.flush()
    series = 'kvlane_attempts_total{{ending="{}",endpoint="pod-{}"}}'
    return 1.0 in [await s.sample(series.format(ending, pod)) for pod in range(2)]


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, STREAMED, BUFFERED])
@pytest.mark.parametrize("alias", ["sim", "nice"])
@pytest.mark.parametrize("rest", [b"", b'data: {"id":'])
async def test_a_stream_that_its_pod_ends_incomplete_ends_with_an_error(mode: int, alias: str, rest: bytes) -> None:
    async with responding(mode, alias, "text/event-stream") as (s, one):
        await one.say(response_body={"body": TOKEN + rest, "end_of_stream": True})
        body = await passed(one, mode, TOKEN + rest)
        assert body.startswith(TOKEN)
        assert body.split(b"\n\n")[-2].startswith(b'data: {"error"')
        await one.end()
        assert await ended(s, "upstream-failed")


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
@pytest.mark.parametrize("alias", ["sim", "nice"])
async def test_an_incomplete_stream_with_trailers_ends_with_an_error(mode: int, alias: str) -> None:
    async with responding(mode, alias, "text/event-stream") as (s, one):
        await one.say(response_body={"body": TOKEN})
        body = await passed(one, mode, TOKEN)
        await one.say(response_trailers={})
        if mode == FULL_DUPLEX_STREAMED:
            body += await passed(one, mode, b"")
        assert (await one.hear()).WhichOneof("kind") == "response_trailers"
        assert body.startswith(TOKEN)
        assert body.split(b"\n\n")[-2].startswith(b'data: {"error"')
        await one.end()
        assert await ended(s, "upstream-failed")


async def test_an_incomplete_stream_is_aborted_if_only_its_trailers_are_left() -> None:
    async with responding(STREAMED, "sim", "text/event-stream") as (s, one):
        await one.say(response_body={"body": TOKEN})
        assert await passed(one, STREAMED, TOKEN) == TOKEN
        await one.say(response_trailers={})
        assert await one.status() is grpc.StatusCode.ABORTED
        assert await ended(s, "upstream-failed")


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
async def test_a_body_with_another_model_is_whole_before_its_trailers(mode: int) -> None:
    came = b'{"model":"sim","choices":[]}'
    async with responding(mode, "nice", "application/json") as (s, one):
        await one.say(response_body={"body": came})
        body = await passed(one, mode, came)
        await one.say(response_trailers={})
        if mode == FULL_DUPLEX_STREAMED:
            body += await passed(one, mode, b"")
        assert (await one.hear()).WhichOneof("kind") == "response_trailers"
        assert orjson.loads(body) == {"model": "nice", "choices": []}
        await one.end()
        assert await ended(s, "complete")


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, STREAMED, BUFFERED])
async def test_a_response_of_a_filter_before_this_one_passes_unchanged(mode: int) -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        await one.say(
            response_headers={"headers": headers({":status": "401", "content-length": "3"})},
            protocol_config={"request_body_mode": FULL_DUPLEX_STREAMED, "response_body_mode": mode},
        )
        await one.say(response_body={"body": b"no\n", "end_of_stream": True})
        head, body = await one.hear(), await one.hear()
        assert not head.response_headers.response.ListFields()
        if mode == FULL_DUPLEX_STREAMED:
            piece = body.response_body.response.body_mutation.streamed_response
            assert (piece.body, piece.end_of_stream) == (b"no\n", True)
        else:
            assert not body.response_body.response.ListFields()
        await one.end()
        assert await one.hear() is grpc.aio.EOF
        assert s.app.ledger.in_flight == 0


@pytest.mark.parametrize("length", ["5, 5", "-9", "x", "9" * 5000])
async def test_an_invalid_length_is_refused(length: str) -> None:
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.head(more={"content-length": length})
        response = (await one.hear()).immediate_response
        assert (response.status.code, b"is no length" in response.body) == (400, True)


async def test_a_response_without_a_status_ends_with_an_error() -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        await one.head()
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        await one.hear()
        await one.hear()
        await one.say(response_headers={"headers": headers({":status": "ok"})})
        response = (await one.hear()).immediate_response
        assert (response.status.code, b"no valid status" in response.body) == (502, True)
        await until(lambda: s.app.ledger.in_flight == 0)


@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_of_a_silent_gateway_ends(turns: int) -> None:
    """Whatever is being written to it at that moment."""
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.say(
            request_headers={"headers": headers({":method": "GET", ":path": "/v1/models"}), "end_of_stream": True}
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        await one.end()
        while await one.hear() is not grpc.aio.EOF:
            pass


async def test_a_buffered_body_is_requested_and_then_replied_to() -> None:
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.head(BUFFERED)
        assert (await one.hear()).WhichOneof("kind") == "request_headers"
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        reply = await one.hear()
        assert DESTINATION in set_by(reply.request_body.response.header_mutation)
        assert reply.request_body.response.body_mutation.WhichOneof("kind") is None


@pytest.mark.parametrize("mode", [NONE, STREAMED])
async def test_a_gateway_that_sends_no_whole_bodies_is_refused(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.head(mode)
        reply = (await one.hear()).immediate_response
        assert reply.status.code == 500
        assert b"request_body_mode" in reply.body
        assert "failed: Envoy sends no bodies" in caplog.text


async def test_a_body_that_is_too_large_is_refused_before_it_arrives() -> None:
    async with gateway({"listen": {"maxBody": "1KiB"}}) as (s, channel):
        one = talk(channel)
        await one.head()
        await one.say(request_body={"body": b"x" * 2000})
        assert (await one.hear()).immediate_response.status.code == 413
        await until(lambda: s.app._server.retained == 0)


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        (BUFFERED, {"response_headers": {"headers": headers({":status": "413"})}}),  # Envoy's own, in place of the body
        (BUFFERED_PARTIAL, {"request_body": {"body": BODY[:10]}}),
    ],
)
async def test_a_body_that_is_too_large_for_the_gateway_is_refused_as_too_large(mode: Any, shown: Any) -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        await one.head(mode)
        assert (await one.hear()).WhichOneof("kind") == "request_headers"
        await one.say(**shown)
        assert (await one.hear()).immediate_response.status.code == 413
        await until(lambda: s.app._server.retained == 0)


@pytest.mark.parametrize(("shown", "status"), [("408", 408), ("503", 502), ("400", 400)])
async def test_a_gateway_that_gives_a_body_up_keeps_the_kind_of_its_status(shown: str, status: int) -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        await one.head()
        await one.say(request_body={"body": BODY[:10]})
        await one.say(response_headers={"headers": headers({":status": shown})})
        assert (await one.hear()).immediate_response.status.code == status
        await until(lambda: s.app._server.retained == 0)


async def test_an_upgrade_is_refused() -> None:
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.head(more={"upgrade": "websocket"})
        assert (await one.hear()).immediate_response.status.code == 400


async def test_a_stream_with_an_invalid_start_is_ended() -> None:
    async with gateway() as (_, channel):
        one = talk(channel)
        await one.say(request_body={"body": b"x"})
        assert await one.status() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("begins", ["request", "response"])
async def test_a_message_of_an_unknown_kind_ends_the_stream(begins: str) -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        if begins == "request":
            await one.head()
        else:
            await one.say(response_headers={"headers": headers({":status": "401"})})
            await one.hear()
        await one.say()
        assert await one.status() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: s.app.ledger.in_flight == 0)


async def test_a_pod_with_a_key_gets_it_and_a_url_path_is_prefixed() -> None:
    async with gateway(BLIND, [{"apiKey": "sk-pod"}] * 2) as (s, channel):
        for endpoint in s.app.fleet.endpoints:
            update(endpoint, url=endpoint.url + "/engine")
        one = talk(channel)
        await one.head(more={"authorization": "Bearer of-the-client"})
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        sent = set_by((await one.hear()).request_headers.response.header_mutation)
        assert (sent["authorization"], sent[":path"]) == ("Bearer sk-pod", "/engine/v1/chat/completions")


async def test_a_request_without_a_response_in_time_is_refused() -> None:
    async with gateway() as (s, channel):
        one = talk(channel)
        await one.head(more={"x-request-timeout-ms": "200"})
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        replies = [await one.hear() for _ in range(3)]
        assert replies[2].immediate_response.status.code == 504
        await until(lambda: s.app.ledger.in_flight == 0)


async def test_health_reports_liveness_and_readiness() -> None:
    async with gateway() as (s, channel):
        for service in ("", "liveness", "readiness", messages.SERVICE):
            assert await health(channel, service) == messages.SERVING, service
        with pytest.raises(grpc.aio.AioRpcError):
            await health(channel, "another")
        s.app._turn_away()
        assert await health(channel, "liveness") == messages.SERVING
        assert await health(channel, messages.SERVICE) == messages.NOT_SERVING


async def test_the_port_speaks_tls_with_a_renewable_certificate(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    file = tmp_path / "own.pem"
    file.write_bytes(first.issue("kvlane").read_bytes())
    async with gateway(tls={"cert": str(file)}) as (s, _):
        for authority in (first, second):
            file.write_bytes(authority.issue("kvlane").read_bytes())
            trusting = grpc.ssl_channel_credentials(authority.file.read_bytes())
            async with grpc.aio.secure_channel(f"127.0.0.1:{s.app.picker_port}", trusting) as channel:
                assert await health(channel, "") == messages.SERVING


async def test_without_the_certificate_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"none\.pem"):
        async with gateway(tls={"cert": str(tmp_path / "none.pem")}):
            pass


async def test_an_endpoint_picker_config_of_llm_d_picks_for_a_gateway() -> None:
    async with SimFleet(2, SimConfig(time_scale=20)) as sim:
        free = {"host": "127.0.0.1", "port": 0}
        pods = {"static": [{"url": url} for url in sim.urls]}
        ours: dict[str, dict[str, Any]] = {"pods": pods, "telemetry": {"accessLog": False}}
        overrides = {"listen": free, "admin": free, "extproc": free, **ours}
        async with (
            App(load(CONFIG / "endpoint-picker.yaml", {}, overrides)) as app,
            channel_to(app.picker_port) as channel,
        ):
            one = talk(channel)
            await one.head()
            await one.say(request_body={"body": BODY, "end_of_stream": True})
            named = set_by((await one.hear()).request_headers.response.header_mutation)[DESTINATION]
            assert f"http://{named}" in sim.urls


async def test_a_gateway_gets_412_for_an_uncached_prompt_and_the_time_in_the_queue() -> None:
    plugins = [{"type": kind} for kind in ("header-profile-handler", "prefix-cache-scorer")]
    async with gateway({"scheduling": {"plugins": plugins}, "flowControl": {"maxConcurrent": 9}}) as (s, channel):
        one = talk(channel)
        await one.head(more={"prefer": "if-available"})
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        refusal = (await one.hear()).immediate_response
        assert (refusal.status.code, orjson.loads(refusal.body)["error"]["code"]) == (412, "not_cached")
        await one.end()

        two, _ = await destination_of(channel)
        await two.say(response_headers={"headers": headers({":status": "200"}), "end_of_stream": True})
        assert set_by((await two.hear()).response_headers.response.header_mutation)[WAITED_HEADER] == "0"
        await two.end()
        await until(lambda: s.app.ledger.in_flight == 0)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "proxy.extproc.server", None)
    with pytest.raises(ConfigError, match=r"extproc\.port: needs the extra: .*pip install .*'kvlane\[extproc\]'"):
        App(from_mapping({"extproc": {"port": 0}}))


async def test_it_listens_only_if_configured() -> None:
    async with stack(1) as s:
        assert s.app.picker_port is None


async def test_the_rank_is_in_a_header_and_its_pod_is_the_destination() -> None:
    ranks = [{"dataParallel": {"size": 4}}, {"dataParallel": {"size": 2}}]
    async with gateway(BLIND, ranks, fallbacks=2) as (s, channel):
        one = talk(channel)
        await one.head(more={"x-data-parallel-rank": "9"})
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        sent = set_by((await one.hear()).request_headers.response.header_mutation)
        named = [
            s.app.fleet.get(f"pod-{index}")
            for index, pod in enumerate(s.pods)
            if pod.url.endswith(sent[DESTINATION].split(",")[0])
        ]
        assert len(named) == 1
        assert int(sent["x-data-parallel-rank"]) < len(named[0].ranks)  # type: ignore[union-attr]
        addresses = sent[DESTINATION].split(",")
        assert len(set(addresses)) == len(addresses), "a fallback is another pod with a rank of this number"


@pytest.mark.parametrize("mode", [FULL_DUPLEX_STREAMED, BUFFERED])
@pytest.mark.parametrize("named", ["own", "another"])
async def test_a_rank_that_its_pod_does_not_have_is_removed_and_not_requested_again(mode: int, named: str) -> None:
    async with gateway(BLIND, [{"dataParallel": {"size": 4}}] * 2) as (s, channel):
        while True:
            one = talk(channel)
            await one.say(
                request_headers={"headers": headers(HEAD)},
                protocol_config={"request_body_mode": FULL_DUPLEX_STREAMED, "response_body_mode": mode},
            )
            await one.say(request_body={"body": BODY, "end_of_stream": True})
            sent = set_by((await one.hear()).request_headers.response.header_mutation)
            await one.hear()
            if (rank := int(sent["x-data-parallel-rank"])) >= 2:
                break
            await one.end()
        text = f"data_parallel_rank {rank if named == 'own' else 9} is out of range [0, 2)."
        await one.say(response_headers={"headers": headers({":status": "400", "content-type": "application/json"})})
        if mode == BUFFERED:
            assert (await one.hear()).WhichOneof("kind") == "response_headers"
        await one.say(response_body={"body": orjson.dumps({"error": {"message": text}}), "end_of_stream": True})
        reply = await one.hear()
        if named == "another":
            assert reply.WhichOneof("kind") == ("response_body" if mode == BUFFERED else "response_headers")
        else:
            assert reply.immediate_response.status.code == 503
            assert sorted(len(pod.ranks) for pod in s.app.fleet.pods) == [2, 4]
        await one.end()
        await until(lambda: s.app.ledger.in_flight == 0)


async def test_a_buffered_404_with_trailers_does_not_list_models_for_a_restricted_key() -> None:
    async with gateway({"security": {"apiKeys": KEYS}}) as (_, channel):
        one = talk(channel)
        await one.say(
            request_headers={"headers": headers({**HEAD, "authorization": "Bearer some"})},
            protocol_config={"request_body_mode": FULL_DUPLEX_STREAMED, "response_body_mode": BUFFERED},
        )
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        assert [(await one.hear()).WhichOneof("kind") for _ in range(2)] == ["request_headers", "request_body"]
        await one.say(response_headers={"headers": headers({":status": "404", "content-type": "application/json"})})
        assert (await one.hear()).WhichOneof("kind") == "response_headers"
        await one.say(response_body={"body": MISSING})
        response = (await one.hear()).immediate_response
        assert (response.status.code, b"secret" in response.body) == (404, False)


@pytest.mark.parametrize(
    ("details", "status"),
    [
        ("upstream_reset_before_response_started{connection_failure}", 502),
        ("upstream_reset_before_response_started{overflow}", 429),
    ],
)
async def test_a_fallback_model_cannot_serve_a_request_that_envoy_failed_to_send(details: str, status: int) -> None:
    async with gateway({**BLIND, **FALLBACK}, TWO_MODELS) as (s, channel):
        one = talk(channel)
        await one.head()
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        sent = set_by((await one.hear()).request_headers.response.header_mutation)
        await one.hear()
        named_details = {"key": "response.code_details", "value": {"string_value": details}}
        attributes = [{"key": ATTRIBUTES, "value": {"fields": [named_details]}}]
        head = {"headers": headers({":status": "503"}), "end_of_stream": True}
        await one.say(response_headers=head, attributes=attributes)
        assert (await one.hear()).immediate_response.status.code == status
        assert sent[DESTINATION] == s.pods[0].url.removeprefix("http://")
        await one.end()
        await until(lambda: s.app.ledger.in_flight == 0)
        s.app.observer.flush()
        failed = 'kvlane_attempts_total{ending="upstream-failed",endpoint="%s"}'
        assert [await s.sample(failed % name) or 0.0 for name in ("pod-0", "pod-1")] == [1.0, 0.0]


async def test_a_response_of_a_filter_behind_this_one_is_no_first_token_of_a_pod() -> None:
    async with gateway(BLIND) as (s, channel):
        for details in ("via_upstream", "cache_hit"):
            one, _ = await destination_of(channel)
            named = [{"key": "response.code_details", "value": {"string_value": details}}]
            head = {"headers": headers({":status": "200", "content-type": "application/json"})}
            await one.say(response_headers=head, attributes=[{"key": ATTRIBUTES, "value": {"fields": named}}])
            await one.say(response_body={"body": b"{}", "end_of_stream": True})
            for _ in ("head", "body"):
                await one.hear()
            await one.end()
            await until(lambda: s.app.ledger.in_flight == 0)
            s.app.observer.flush()
            series = 'kvlane_time_to_first_token_seconds_count{model="sim",stream="false"}'
            assert await s.sample(series) == 1.0, "only the response of the pod"


async def fail_over(channel: Any) -> None:
    """Send a request for a stream, to which the fallback pod responds."""
    one = talk(channel)
    await one.head(more={"authorization": "Bearer some"})
    await one.say(request_body={"body": BODY[:-1] + b',"stream":true}', "end_of_stream": True})
    sent = set_by((await one.hear()).request_headers.response.header_mutation)
    await one.hear()
    served = [{"key": "upstream.address", "value": {"string_value": sent[DESTINATION].split(",")[1]}}]
    head = {"headers": headers({":status": "200", "content-type": "text/event-stream"})}
    await one.say(response_headers=head, attributes=[{"key": ATTRIBUTES, "value": {"fields": served}}])
    usage = b'{"prompt_tokens":9,"completion_tokens":400}'
    events = b'data: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % usage
    await one.say(response_body={"body": events, "end_of_stream": True})
    for _ in ("head", "body"):
        await one.hear()
    await one.end()


async def test_a_response_of_a_pod_to_which_envoy_went_on_by_itself_is_charged_for() -> None:
    keys = [{"name": "some", "key": "some", "limits": {"tokensPerDay": 100}}]
    async with gateway({**BLIND, "security": {"apiKeys": keys}}, fallbacks=1) as (s, channel):
        await fail_over(channel)
        await until(lambda: s.app.ledger.in_flight == 0)
        one = talk(channel)
        await one.head(more={"authorization": "Bearer some"})
        await one.say(request_body={"body": BODY, "end_of_stream": True})
        assert (await one.hear()).immediate_response.status.code == 429
        await one.end()


async def destination_of(channel: Any) -> tuple[Talk, str]:
    """Send a request. Return its talk, after the reply to its body, and the destination of the reply."""
    one = talk(channel)
    await one.head()
    await one.say(request_body={"body": BODY, "end_of_stream": True})
    sent = set_by((await one.hear()).request_headers.response.header_mutation)
    await one.hear()
    return one, sent[DESTINATION]


async def test_a_fallback_pod_without_an_address_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Addresses.of
    async with gateway(BLIND, fallbacks=2) as (s, channel):
        lost = s.pods[1].url

        async def of(addresses: Addresses, endpoint: Endpoint) -> str:
            if endpoint.url == lost:
                raise ConnectFailed("no such host")
            return await known(addresses, endpoint)

        monkeypatch.setattr(Addresses, "of", of)
        one, destination = await destination_of(channel)
        assert destination == s.pods[0].url.removeprefix("http://")
        await one.end()


@pytest.mark.parametrize("is_followed_up", [True, False], ids=["follow-up", "retrieval"])
async def test_a_stored_response_is_reached_only_on_a_pod_that_envoy_allows(is_followed_up: bool) -> None:
    async with gateway() as (s, channel):
        async with s.http.post(f"{s.url}/v1/responses", json={"model": "sim", "input": "Hi"}) as response:
            stored, holder = (await response.json())["id"], response.headers["x-kvlane-endpoint"]
        for index, pod in enumerate(s.pods):
            one, address = talk(channel), pod.url.removeprefix("http://")
            path = "/v1/responses" if is_followed_up else f"/v1/responses/{stored}"
            head = {**HEAD, ":method": "POST" if is_followed_up else "GET", ":path": path}
            await one.say(
                request_headers={"headers": headers(head), "end_of_stream": not is_followed_up},
                metadata_context=allowing(address),
            )
            if is_followed_up:
                body = orjson.dumps({"model": "sim", "input": "And?", "previous_response_id": stored})
                await one.say(request_body={"body": body, "end_of_stream": True})
            reply = await one.hear()
            if holder == f"pod-{index}":
                assert set_by(reply.request_headers.response.header_mutation)[DESTINATION] == address
            else:
                assert reply.immediate_response.status.code == 503
                assert b"Envoy allows" in reply.immediate_response.body
            await one.end()


async def test_a_response_that_is_streamed_is_found_on_its_pod() -> None:
    async with gateway() as (_, channel):
        one, path = talk(channel), "/v1/responses"
        await one.say(request_headers={"headers": headers({**HEAD, ":path": path})})
        body = orjson.dumps({"model": "sim", "input": "Hi", "stream": True})
        await one.say(request_body={"body": body, "end_of_stream": True})
        holder = set_by((await one.hear()).request_headers.response.header_mutation)[DESTINATION]
        await one.hear()
        await one.say(response_headers={"headers": headers({":status": "200", "content-type": "text/event-stream"})})
        await one.hear()
        created = b'data: {"response":{"id":"resp_1","object":"response"},"type":"response.created"}\n\n'
        await one.say(response_body={"body": created})
        await one.hear()
        for _ in range(3):
            other = talk(channel)
            head = headers({**HEAD, ":method": "GET", ":path": f"{path}/resp_1"})
            await other.say(request_headers={"headers": head, "end_of_stream": True})
            assert set_by((await other.hear()).request_headers.response.header_mutation)[DESTINATION] == holder
            await other.end()
        await one.end()


def allowing(address: str) -> dict[str, Any]:
    """Return the metadata of a request that may go to this pod alone."""
    subset = {"key": SUBSET_KEY, "value": {"string_value": address}}
    return {"filter_metadata": [{"key": SUBSET_NAMESPACE, "value": {"fields": [subset]}}]}


@asynccontextmanager
async def disaggregated(connector: ConnectorName) -> AsyncIterator[tuple[Stack, Any]]:
    """kvlane before two prefill and two decode pods, and a gRPC channel to it."""
    given = {**BLIND, **sections(connector, "5s"), "extproc": {"host": "127.0.0.1", "port": 0, "fallbacks": 2}}
    configs = [replace(SIM, role=role, connector=connector) for role in ROLES]
    async with (
        stack(4, configs, given, [{"role": role} for role in ROLES]) as s,
        channel_to(s.app.picker_port) as channel,
    ):
        yield s, channel


async def test_a_computed_prompt_has_one_decode_pod_for_destination() -> None:
    async with disaggregated("nixl") as (_, channel):
        one, destination = await destination_of(channel)
        assert "," not in destination
        await one.end()


async def test_a_prefill_that_fails_after_the_destination_was_sent_ends_the_request() -> None:
    async with disaggregated("mooncake") as (s, channel):
        meet(prefills(s), Fault(FaultKind.RESET))
        one, _ = await destination_of(channel)
        assert (await one.hear()).immediate_response.status.code == 502
        await one.end()
        await until(lambda: s.app.ledger.in_flight == 0)


@pytest.mark.parametrize("connector", ["mooncake", "sglang", "nixl"])
async def test_another_prefill_pod_is_tried_if_the_first_accepts_no_connection(connector: ConnectorName) -> None:
    async with disaggregated(connector) as (s, channel):
        gone, other = prefills(s)
        await gone.kill()
        for _ in range(4):
            other.requests.clear()
            one, _ = await destination_of(channel)
            await until(lambda: bool(other.requests))
            await one.say(response_headers={"headers": headers({":status": "200"}), "end_of_stream": True})
            assert (await one.hear()).WhichOneof("kind") == "response_headers"
            await one.end()
            await until(lambda: s.app.ledger.in_flight == 0)
        s.app.observer.flush()
        failed = await s.sample('kvlane_attempts_total{ending="upstream-failed",endpoint="pod-0"}')
        assert failed is not None
        assert failed >= 1.0
