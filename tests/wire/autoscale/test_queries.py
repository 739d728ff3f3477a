"""Metrics and signals that are queries, against a small Prometheus."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.autoscale.measures import KnownLoad, Measured, metrics_of, signals_of
from proxy.autoscale.prometheus import Queries, QueryFailed, ask, value_of
from proxy.autoscale.settings import PrometheusSettings, ScalingPolicy, load
from proxy.core.errors import ConfigError
from proxy.core.ports import ManualClock
from tests.helpers.autoscale.pools import pool

ROLES = [
    {
        "name": "prefill",
        "min": 1,
        "max": 9,
        "metrics": [{"name": "arrivals", "kind": "total", "target": 4, "source": "promql: sum(rate(asked[1m]))"}],
    },
    {"name": "decode", "min": 1, "max": 9, "metrics": [{"name": "requests_running", "kind": "avg", "target": 8}]},
]
SIGNALS = {"decode": {"swap": {"source": "promql:avg(swapped)", "saturation": 2}}}


def querying() -> ScalingPolicy:
    section = {"roles": ROLES, "coordination": {"mode": "preferred", "signals": SIGNALS}}
    return load({"prometheus": {"url": "http://p:9090"}, "pools": {"default": section}}).pools["default"]


class FakePrometheus:
    """Responds to instant queries with the text of a value, or with a whole result."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.headers: list[str | None] = []
        self.app = web.Application()
        self.app.router.add_get("/prefix/api/v1/query", self.query)

    async def query(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("authorization"))
        found = self.values.get(request.query["query"])
        if found is None:
            content = {"status": "error", "errorType": "bad_data", "error": "parse error"}
            return web.json_response(content, status=400)
        if isinstance(found, str):
            found = {"resultType": "vector", "result": [{"metric": {}, "value": [1790000000.0, found]}]}
        return web.json_response({"status": "success", "data": found})


@pytest.fixture
async def server() -> AsyncIterator[tuple[FakePrometheus, str]]:
    fake = FakePrometheus()
    async with TestServer(fake.app) as running:
        yield fake, str(running.make_url("/prefix/"))


async def test_a_query_gives_the_value_of_prometheus(server: tuple[FakePrometheus, str], tmp_path: Path) -> None:
    fake, url = server
    fake.values["sum(up)"] = "2.5"
    assert await ask(PrometheusSettings(url), "sum(up)") == 2.5
    token = tmp_path / "token"
    token.write_text("abc\n")
    assert await ask(PrometheusSettings(url, token_file=str(token)), "sum(up)") == 2.5
    assert await ask(PrometheusSettings(url, token="xyz"), "sum(up)") == 2.5
    assert fake.headers == [None, "Bearer abc", "Bearer xyz"]


async def test_a_failed_query_has_its_reason(server: tuple[FakePrometheus, str]) -> None:
    with pytest.raises(QueryFailed, match="parse error"):
        await ask(PrometheusSettings(server[1]), "sum(")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (PrometheusSettings("http://127.0.0.1:1"), "ClientConnector"),
        (PrometheusSettings("http://127.0.0.1:1", token_file="/nowhere/token"), "FileNotFound"),
        (PrometheusSettings("https://127.0.0.1:1", ca_file="/nowhere/ca"), "FileNotFound"),
    ],
)
async def test_an_unreachable_server_is_no_value(settings: PrometheusSettings, why: str) -> None:
    with pytest.raises(QueryFailed, match=why):
        await ask(settings, "up")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"resultType": "vector", "result": []}, "no series"),
        ({"resultType": "vector", "result": [{"value": [0, "1"]}] * 2}, "2 series"),
        ({"resultType": "matrix", "result": []}, "a matrix"),
        ({"resultType": "scalar", "result": [0, "NaN"]}, "no finite number"),
        ({"resultType": "vector", "result": [{"value": [0, "+Inf"]}]}, "no finite number"),
    ],
)
def test_only_one_finite_number_is_a_value(data: Any, why: str) -> None:
    with pytest.raises(QueryFailed, match=why):
        value_of({"status": "success", "data": data})


@pytest.mark.parametrize(
    "content",
    [
        *("", [], None, {"status": "error"}, {"status": "success"}, {"status": "success", "data": None}),
        {"status": "success", "data": {"resultType": "vector", "result": [{"histogram": [0, {}]}]}},
        {"status": "success", "data": {"resultType": "scalar", "result": [0]}},
        {"status": "success", "data": {"resultType": "scalar", "result": [0, "one"]}},
    ],
)
def test_a_response_that_is_not_of_prometheus_is_no_value(content: Any) -> None:
    with pytest.raises(QueryFailed):
        value_of(content)


def test_a_scalar_is_a_value() -> None:
    assert value_of(json.loads('{"status":"success","data":{"resultType":"scalar","result":[1,"0.5"]}}')) == 0.5


class GivenValues:
    """Returns given values, and counts."""

    def __init__(self, **values: float) -> None:
        self.values = values
        self.count = 0

    async def __call__(self, query: str) -> float:
        self.count += 1
        if query not in self.values:
            raise QueryFailed("no series")
        return self.values[query]


async def test_metrics_and_signals_have_the_values_of_their_queries() -> None:
    clock, settings = ManualClock(now=100.0), querying()
    queries = Queries(GivenValues(**{"sum(rate(asked[1m]))": 12.0, "avg(swapped)": 0.5}), clock)
    await queries.update(settings)
    measured = Measured((), KnownLoad(), 101.0, 45.0, queried=queries.values)
    prefill, decode = settings.roles
    metrics, signals = metrics_of(settings, prefill, measured), signals_of(settings, decode, measured)
    assert (metrics["arrivals"], signals["swap"]) == (12.0, 0.5)


def test_each_query_goes_missing_at_its_own_age() -> None:
    settings = querying()
    queried = {"promql: sum(rate(asked[1m]))": (12.0, 10.0), "promql:avg(swapped)": (0.5, 11.0)}
    measured = Measured((), KnownLoad(), 56.0, 45.0, queried=queried)
    prefill, decode = settings.roles
    assert metrics_of(settings, prefill, measured) == {"arrivals": None}
    assert signals_of(settings, decode, measured)["swap"] == 0.5


async def test_a_value_that_is_not_renewed_ages(caplog: pytest.LogCaptureFixture) -> None:
    clock, settings, received = ManualClock(now=100.0), querying(), GivenValues(**{"sum(rate(asked[1m]))": 12.0})
    queries = Queries(received, clock)
    await queries.update(settings)
    received.values = {}
    for _ in range(3):
        clock.advance(15)
        await queries.update(settings)
    assert {source: at for source, (_, at) in queries.values.items()} == {"promql: sum(rate(asked[1m]))": 100.0}
    assert received.count == 8
    assert sum("has no value" in one.message for one in caplog.records) == 2


async def test_values_of_removed_queries_are_dropped() -> None:
    clock = ManualClock(now=100.0)
    queries = Queries(GivenValues(**{"sum(rate(asked[1m]))": 12.0}), clock)
    await queries.update(querying())
    await queries.update(pool())
    assert not queries.values


def test_queries_need_a_prometheus() -> None:
    signals = {"decode": {"swap": {"source": "promql: ", "saturation": 2}}}
    section = {"roles": ROLES, "coordination": {"mode": "preferred", "signals": signals}}
    with pytest.raises(ConfigError) as caught:
        load({"pools": {"default": section}})
    assert {problem.path for problem in caught.value.problems} == {
        "autoscale.pools.default.roles[0].metrics[0].source",
        "autoscale.pools.default.coordination.signals.decode.swap.source",
    }


@pytest.mark.parametrize("prometheus", [{"url": "prometheus"}, {"url": "http://p", "token": "a", "tokenFile": "b"}])
def test_a_wrong_prometheus_is_reported(prometheus: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="prometheus"):
        load({"prometheus": prometheus, "pools": {}})
