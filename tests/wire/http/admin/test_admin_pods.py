from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.endpoint import EndpointState, Freshness, Metrics
from proxy.fleet.settings import PodSettings
from tests.helpers.http.admin.fakes import admin_port


async def test_a_pod_is_shown_with_all_properties_except_its_key() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a", role="decode", labels={"gpu": "h100"}, weight=2.0, models=("m",), api_key="s3")
        metrics = Metrics(3, 7, 0.5, frozenset({"lora"}), attributes={"x": 1.0, "nan": float("nan")})
        endpoint.publish(Metrics(**{**_fields(metrics), "freshness": Freshness.FRESH}), 0)
        endpoint.charge(2, 0)
        shown = await port.json("GET", "/admin/pods")
        assert shown == {"pods": [await port.json("GET", "/admin/pods/pod-a")]}
    pod = shown["pods"][0]
    assert pod["name"] == "pod-a"
    assert pod["state"] == "ready"
    assert pod["role"] == "decode"
    assert pod["labels"]["gpu"] == "h100"
    assert pod["weight"] == 2
    assert pod["models"] == ["m"]
    assert pod["metrics"]["waiting"] == 3
    assert pod["metrics"]["activeModels"] == ["lora"]
    assert pod["metrics"]["attributes"] == {"x": 1.0}
    assert pod["load"] == {"requests": 2, "tokens": 0}
    assert pod["view"] == {"waiting": 5, "running": 7, "kvUsage": 0.5}
    assert "s3" not in str(pod)


async def test_a_pod_that_was_never_scraped_has_no_metrics() -> None:
    async with admin_port() as port:
        port.add("pod-a")
        pod = await port.json("GET", "/admin/pods/pod-a")
        assert pod["metrics"] is None
        assert pod["models"] is None


async def test_a_pod_is_added_with_the_schema_of_the_file() -> None:
    async with admin_port() as port:
        entry = {"url": "http://vllm-9:8000/", "labels": {"gpu": "h100"}, "weight": 2, "apiKey": "s3"}
        pod = await port.json("POST", "/admin/pods", 201, json=entry)
        assert (pod["name"], pod["state"], pod["labels"]) == ("vllm-9:8000", "starting", {"gpu": "h100"})
        endpoint = port.fleet.get("vllm-9:8000")
        assert endpoint is not None
        assert (endpoint.url, endpoint.weight, endpoint.api_key) == ("http://vllm-9:8000", 2, "s3")


async def test_a_pod_that_is_added_again_is_updated() -> None:
    async with admin_port() as port:
        first = port.add("pod-a")
        again = {"url": "http://pod-a:8000/", "name": "pod-a", "weight": 3}
        pod = await port.json("POST", "/admin/pods", 200, json=again)
        assert (pod["url"], pod["weight"]) == ("http://pod-a:8000", 3)
        assert port.fleet.endpoints == [first]


async def test_a_pod_added_again_is_still_removed_with_its_source() -> None:
    async with admin_port() as port:
        port.fleet.reconcile("static", [PodSettings(url="http://pod-a:8000", name="pod-a")])
        await port.json("POST", "/admin/pods", 200, json={"url": "http://pod-a:8000", "name": "pod-a"})
        port.fleet.reconcile("static", [])
        assert port.fleet.endpoints == []


async def test_a_pod_is_not_replaced_by_another_of_its_name() -> None:
    async with admin_port() as port:
        first = port.add("pod a", "http://pod-a:8000")
        other = {"url": "http://pod-a:9000", "name": "pod a"}
        error = await port.error("POST", "/admin/pods", 409, json=other)
        assert error["param"] == "url"
        assert "DELETE /admin/pods/pod%20a first" in error["message"]
        assert (port.fleet.endpoints, first.url) == ([first], "http://pod-a:8000")
        first.charge(1, 0)
        await port.json("DELETE", "/admin/pods/pod%20a", 202)
        assert (await port.json("POST", "/admin/pods", 200, json=other))["url"] == "http://pod-a:9000"


async def test_the_reason_of_missing_metrics_is_shown() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        assert (await port.json("GET", "/admin/pods/pod-a"))["scrapeFailure"] is None
        port.fleet.missed(endpoint, "status 401")
        assert (await port.json("GET", "/admin/pods/pod-a"))["scrapeFailure"] == "status 401"
        endpoint.publish(Metrics(freshness=Freshness.FRESH), 0)
        port.fleet.refreshed(endpoint)
        assert (await port.json("GET", "/admin/pods/pod-a"))["scrapeFailure"] is None


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "is empty", None),
        (b"{", "not valid JSON", None),
        (b"[]", "must be a mapping", None),
        (b"{}", "url: is required", "url"),
        (b'{"url": "ftp://x"}', "is no URL of a pod", None),
        (b'{"url": "http://x", "wieght": 2}', "did you mean 'weight'?", None),
        (b'{"url": "http://x", "weight": 0}', "must be more than 0", "weight"),
        (b'{"url": "http://x", "weight": "a", "labels": 1}', "labels: must be a mapping", "labels"),
        (b'{"url": "http://pod-a:8000", "name": "b"}', "'pod-a' has this URL already", "url"),
    ],
)
async def test_an_invalid_entry_is_refused_with_its_fault(body: bytes, message: str, param: str | None) -> None:
    async with admin_port() as port:
        port.add("pod-a")
        error = await port.error("POST", "/admin/pods", 400, data=body)
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
        if param:
            assert error["param"] == param
        assert len(port.fleet.endpoints) == 1


async def test_a_draining_pod_gets_no_new_requests_until_undrained() -> None:
    async with admin_port() as port:
        port.add("pod-a")
        assert (await port.json("POST", "/admin/pods/pod-a/drain"))["state"] == "draining"
        assert not port.fleet.ready
        assert (await port.json("POST", "/admin/pods/pod-a/undrain"))["state"] == "ready"
        assert port.fleet.ready


async def test_a_removed_pod_finishes_its_requests_first() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        endpoint.charge(1, 0)
        assert (await port.json("DELETE", "/admin/pods/pod-a", 202))["state"] == "draining"
        assert port.fleet.get("pod-a") is endpoint
        endpoint.charge(-1, 0)
        port.fleet.sweep()
        await port.error("DELETE", "/admin/pods/pod-a", 404)


async def test_an_idle_pod_is_removed_at_once() -> None:
    async with admin_port() as port:
        port.add("pod-a")
        await port.json("DELETE", "/admin/pods/pod-a", 202)
        assert port.fleet.endpoints == []


@pytest.mark.parametrize("name", ["10.0.0.1:8000", "[::1]:8000", "häs%20päs"])
async def test_names_with_any_characters_are_found(name: str) -> None:
    async with admin_port() as port:
        port.add(name, url="http://pod-a:8000")
        path = port.client.make_url("/admin/pods").joinpath(name)
        async with port.client.session.post(path / "drain") as response:
            assert (await response.json())["name"] == name


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/admin/pods/ghost"),
        ("DELETE", "/admin/pods/ghost"),
        ("POST", "/admin/pods/ghost/drain"),
        ("POST", "/admin/pods/ghost/undrain"),
        ("GET", "/admin/pods/ghost/proxy/metrics"),
    ],
)
async def test_an_unknown_pod_is_reported(method: str, path: str) -> None:
    async with admin_port() as port:
        error = await port.error(method, path, 404)
        assert error["code"] == "pod_not_found"
        assert "'ghost'" in error["message"]


def _fields(metrics: Metrics) -> dict[str, Any]:
    return {name: getattr(metrics, name) for name in Metrics.__slots__}


async def test_ejection_reasons_are_shown() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        port.fleet.eject(endpoint, "ill")
        pod = await port.json("GET", "/admin/pods/pod-a")
        assert (pod["doubts"], pod["breaker"], pod["scrapeAge"]) == (["ill"], "closed", None)


async def test_a_drain_can_be_waited_for() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        endpoint.charge(1, 0)
        waiting = asyncio.create_task(port.json("POST", "/admin/pods/pod-a/drain?wait=30s"))
        while endpoint.state is not EndpointState.DRAINING:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        assert not waiting.done()
        endpoint.charge(-1, 0)
        pod = await waiting
        assert (pod["state"], pod["load"]["requests"]) == ("draining", 0)


async def test_a_drain_that_takes_too_long_is_reported_and_continues() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        endpoint.charge(1, 0)
        pod = await port.json("POST", "/admin/pods/pod-a/drain?wait=100ms", 202)
        assert (pod["state"], pod["load"]["requests"]) == ("draining", 1)


async def test_a_client_waiting_for_an_undone_drain_is_notified() -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        endpoint.charge(1, 0)
        waiting = asyncio.create_task(port.json("POST", "/admin/pods/pod-a/drain?wait=30s", 202))
        while endpoint.state is not EndpointState.DRAINING:
            await asyncio.sleep(0.005)
        await port.json("POST", "/admin/pods/pod-a/undrain")
        assert (await waiting)["state"] == "ready"


@pytest.mark.parametrize("wait", ["soon", "20m", "-1s"])
async def test_an_invalid_wait_changes_nothing(wait: str) -> None:
    async with admin_port() as port:
        endpoint = port.add("pod-a")
        error = await port.error("POST", f"/admin/pods/pod-a/drain?wait={wait}", 400)
        assert error["param"] == "wait"
        assert endpoint.state is EndpointState.READY
