"""Traces of the whole proxy, as a collector gets them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from opentelemetry.semconv import attributes
from opentelemetry.semconv._incubating import attributes as incubating

from proxy.core.errors import ConfigError
from proxy.http.upstream.connection import ResponseMeter
from proxy.lab.sim import Fault, FaultKind
from proxy.telemetry import traces
from tests.helpers.http.support import plain
from tests.helpers.scenarios.disagg import ROLES, SIM, ask, sections
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.telemetry.collector import Collector, Received
from tests.helpers.waiting import PATIENCE, until
from tests.wire.scenarios.test_transparency import engine, relayed

SERVER, CLIENT, INTERNAL = 2, 3, 1
ERROR = 2

THEIRS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_DRAWN = THEIRS[:-1] + "0"
SECRET = "a confidential prompt"


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are sent by a thread: its waits are not skipped, and on a busy machine it gets its CPU late."""
    monkeypatch.setattr(traces, "INTERVAL", 0.02)
    monkeypatch.setattr(traces, "EXPORT_TIMEOUT", PATIENCE)
    monkeypatch.setattr(traces, "LAST_SECONDS", PATIENCE)


def tracing(collector: Collector, **more: Any) -> Mapping[str, Any]:
    return {"telemetry": {"tracing": {"endpoint": collector.url, **more}}}


@asynccontextmanager
async def traced(pods: int = 2, **more: Any) -> AsyncIterator[tuple[Stack, Collector]]:
    async with Collector() as collector, stack(pods, settings=tracing(collector, **more)) as s:
        yield s, collector


def by_kind(spans: list[Received], kind: int) -> Received:
    (found,) = (span for span in spans if span.kind == kind)
    return found


async def test_a_request_is_a_span_with_its_decision_and_its_attempt_inside() -> None:
    async with traced() as (s, collector):
        await s.chat(SECRET, max_tokens=5)
        await collector.until(3)
    server, attempt, decision = (by_kind(collector.spans, kind) for kind in (SERVER, CLIENT, INTERNAL))
    assert (server.name, attempt.name, decision.name) == ("chat sim", "chat sim", "schedule")
    assert {span.trace for span in collector.spans} == {server.trace}
    assert (server.parent, attempt.parent, decision.parent) == ("", server.id, server.id)
    assert server.begins <= decision.begins <= decision.ends <= attempt.begins + 1e9
    assert attempt.begins < attempt.ends <= server.ends + 1e9
    assert server.resource["service.name"] == "kvlane"


async def test_spans_obey_the_conventions_and_contain_no_prompts() -> None:
    async with traced() as (s, collector):
        body = {"model": "sim", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "stream": True}
        async with s.http.post(s.url + CHAT, json={**body, "stream_options": {"include_usage": True}}) as response:
            await response.read()
        await collector.until(3)
    server, attempt, decision = (by_kind(collector.spans, kind).attributes for kind in (SERVER, CLIENT, INTERNAL))
    assert server["gen_ai.operation.name"] == attempt["gen_ai.operation.name"] == "chat"
    assert server["gen_ai.request.model"] == attempt["gen_ai.request.model"] == "sim"
    assert server["gen_ai.usage.output_tokens"] == attempt["gen_ai.usage.output_tokens"] == 5
    assert server["gen_ai.usage.input_tokens"] > 0
    assert server["http.response.status_code"] == attempt["http.response.status_code"] == 200
    assert (server["url.path"], server["kvlane.outcome"]) == (CHAT, "complete")
    assert 0 < attempt["gen_ai.response.time_to_first_chunk"] <= server["gen_ai.response.time_to_first_chunk"]
    assert attempt["gen_ai.provider.name"] == "vllm"
    assert attempt["server.address"] == "127.0.0.1"
    assert attempt["server.port"] > 0
    assert attempt["kvlane.endpoint"] == decision["kvlane.endpoint"] == server["kvlane.endpoint"]
    assert decision["kvlane.candidates"] == 2
    assert "error.type" not in server
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_every_other_name_is_one_of_the_conventions() -> None:
    async with traced() as (s, collector):
        await s.chat(max_tokens=5)
        await s.post("/v1/nothing", {})
        await collector.until(4)
    names = {name for span in collector.spans for name in span.attributes if not name.startswith("kvlane.")}
    assert names - conventional() == set()
    assert "gen_ai.response.time_to_first_chunk" not in names, "it is of streams alone"


def conventional() -> set[str]:
    """What the package that comes with the SDK calls attributes."""
    found = set()
    for folder in (attributes, incubating):
        for module in pkgutil.iter_modules(folder.__path__):
            names = vars(importlib.import_module(f"{folder.__name__}.{module.name}"))
            found |= {value for name, value in names.items() if name.isupper() and isinstance(value, str)}
    return found


async def test_a_trace_continues_from_the_client_to_the_pod() -> None:
    async with Collector() as collector:
        headers = [("traceparent", THEIRS), ("tracestate", "vendor=its-own")]
        async with relayed(engine(plain()), headers=headers, **tracing(collector)) as (_, _, got):
            await collector.until(3)
    server, attempt = by_kind(collector.spans, SERVER), by_kind(collector.spans, CLIENT)
    assert (server.trace, server.parent) == (THEIRS[3:35], THEIRS[36:52])
    assert got.all(b"traceparent") == [f"00-{server.trace}-{attempt.id}-01".encode()]
    assert got.all(b"tracestate") == [b"vendor=its-own"]
    assert server.state == "vendor=its-own"


async def test_a_request_that_the_client_did_not_sample_is_not_traced() -> None:
    async with Collector() as collector:
        headers = [("traceparent", NOT_DRAWN)]
        async with relayed(engine(plain()), headers=headers, **tracing(collector)) as (_, _, got):
            (header,) = got.all(b"traceparent")
    assert header.startswith(NOT_DRAWN[:36].encode())
    assert header.endswith(b"-00")
    assert not collector.spans


async def test_an_invalid_trace_is_not_passed_on() -> None:
    async with Collector() as collector:
        headers = [("traceparent", "nonsense"), ("tracestate", "of=nobody")]
        async with relayed(engine(plain()), headers=headers, **tracing(collector)) as (_, _, got):
            (header,) = got.all(b"traceparent")
            assert not got.all(b"tracestate")
            await collector.until(3)
    assert header.decode()[3:35] == collector.spans[0].trace


async def test_without_tracing_trace_headers_pass() -> None:
    headers = [("traceparent", "anything"), ("tracestate", "a=b")]
    async with relayed(engine(plain()), headers=headers) as (_, _, got):
        assert got.all(b"traceparent") == [b"anything"]
        assert got.all(b"tracestate") == [b"a=b"]


async def test_with_sample_0_only_requests_sampled_by_the_client_are_traced() -> None:
    async with traced(sample=0) as (s, collector):
        await s.chat()
        await s.post(CHAT, {"model": "sim", "messages": [{"role": "user", "content": "Hi"}]}, {"traceparent": THEIRS})
        await collector.until(3)
    assert {span.trace for span in collector.spans} == {THEIRS[3:35]}


async def test_pods_learn_that_a_request_was_not_sampled() -> None:
    async with Collector() as collector, relayed(engine(plain()), **tracing(collector, sample=0)) as (_, _, got):
        (header,) = got.all(b"traceparent")
    version, trace, span, flags = header.decode().split("-")
    assert (version, len(trace), len(span), flags) == ("00", 32, 16, "00")


async def test_a_second_attempt_is_a_span_next_to_the_failed_one() -> None:
    async with traced() as (s, collector):
        for pod in s.pods:
            pod.faults.set([Fault(FaultKind.REJECT, status=503)])
        response, _ = await s.chat()
        assert response.status == 503
        await collector.until(4)
    spans = sorted((span for span in collector.spans if span.kind == CLIENT), key=lambda span: span.begins)
    server = by_kind(collector.spans, SERVER)
    assert len(spans) >= 2
    assert [attempt.attributes["kvlane.attempt"] for attempt in spans] == list(range(len(spans)))
    assert all(
        attempt.status == ERROR and attempt.attributes["error.type"] in ("upstream-failed", "503") for attempt in spans
    )
    assert server.status == ERROR
    assert server.attributes["kvlane.attempts"] == len(spans)


async def test_a_refusal_is_a_span_with_its_reason() -> None:
    async with traced() as (s, collector):
        body = {"model": "nobody-has-it", "messages": [{"role": "user", "content": "Hi"}]}
        response, _ = await s.post(CHAT, body, {"traceparent": THEIRS})
        assert response.status == 404
        await collector.until(1)
    (span,) = collector.spans
    assert (span.trace, span.attributes["error.type"]) == (THEIRS[3:35], "unknown-model")
    assert span.attributes["http.response.status_code"] == 404


async def test_a_defect_after_the_response_has_started_is_an_error_with_the_status_that_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    async with traced() as (s, collector):
        monkeypatch.setattr(ResponseMeter, "finish", breaks)
        body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with s.http.post(s.url + CHAT, json=body) as response:
            with suppress(aiohttp.ClientError):  # the last bytes may be sent before
                await response.read()
        await collector.until(3)
    server = by_kind(collector.spans, SERVER)
    assert (response.status, server.attributes["http.response.status_code"]) == (200, 200)
    assert (server.status, server.attributes["error.type"]) == (ERROR, "internal-error")


async def test_a_prefill_attempt_is_a_span() -> None:
    configs, each = [replace(SIM, role=role, connector="nixl") for role in ROLES], [{"role": role} for role in ROLES]
    async with (
        Collector() as collector,
        stack(len(ROLES), configs, {**sections("nixl", "10s"), **tracing(collector)}, each) as s,
    ):
        await ask(s, stream=False)
        await collector.until(4)
    spans = {span.attributes["kvlane.stage"]: span for span in collector.spans if span.kind == CLIENT}
    assert set(spans) == {"prefill", "decode"}
    assert spans["prefill"].parent == spans["decode"].parent == by_kind(collector.spans, SERVER).id
    decision = by_kind(collector.spans, INTERNAL).attributes
    assert decision["kvlane.prefill_endpoint"] == spans["prefill"].attributes["kvlane.endpoint"]
    assert decision["kvlane.stages"] == "split"


async def test_unsent_spans_are_sent_when_the_proxy_stops() -> None:
    async with Collector() as collector:
        async with stack(1, settings=tracing(collector)) as s:
            for _ in range(5):
                await s.chat()
            lost = s.app._catalogue.spans_lost.cell()
        assert len(collector.spans) == 15
        assert lost.value == 0


@pytest.mark.parametrize("how", ["refuses", "hangs", "is away"])
async def test_a_silent_collector_costs_spans_and_no_request(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "hangs":
        monkeypatch.setattr(traces, "LAST_SECONDS", 0.1)
    if how == "is away":
        monkeypatch.setattr(traces, "EXPORT_TIMEOUT", 0.5)  # less than the pause before a second connection attempt
    async with Collector() as collector:
        collector.takes, collector.hangs = how != "refuses", how == "hangs"
        endpoint = "http://127.0.0.1:1" if how == "is away" else collector.url
        settings = {"telemetry": {"tracing": {"endpoint": endpoint}}}
        async with stack(1, settings=settings) as s:
            for _ in range(3):
                response, _ = await s.chat()
                assert response.status == 200
            catalogue = s.app._catalogue
        assert catalogue.spans_lost.cell().value == 9
        assert not collector.spans


async def test_requests_are_served_while_the_collector_holds_a_batch() -> None:
    async with traced() as (s, collector):
        collector.hangs = True
        await s.chat()
        await until(lambda: collector.held == 1)
        for _ in range(10):
            response, _ = await s.chat()
            assert response.status == 200
        assert (collector.held, collector.spans) == (1, []), "the one batch has been waited for all the while"
        assert s.app._catalogue.spans_lost.cell().value == 0
        collector.release()
        await collector.until(33)


async def test_keys_of_the_collector_are_sent_to_it_only() -> None:
    async with traced(collectorHeaders={"x-team": "hush-hush"}) as (s, collector):
        await s.chat()
        await collector.until(3)
        _, shown = await s.operate("GET", "/admin/config")
    assert collector.headers[0]["x-team"] == "hush-hush"
    assert "hush-hush" not in str(shown)


async def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "proxy.telemetry.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvlane\[otel\]'"):
        async with stack(1, settings={"telemetry": {"tracing": {}}}):
            pass
