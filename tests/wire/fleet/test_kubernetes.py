"""Which pods a cluster has, by what its objects say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.endpoint import EndpointState
from proxy.core.errors import ConfigError
from proxy.core.params import load
from proxy.core.ports import SystemClock
from proxy.fleet.discovery.kubernetes import KubernetesSource
from proxy.fleet.settings import KubernetesSettings, PodSettings
from proxy.fleet.store import Fleet
from tests.helpers.kubernetes.server import (
    FakeApiServer,
    Object,
    endpoint,
    endpoint_slice,
    pod,
    pods_in,
    pool,
    pools_in,
    slices_in,
)
from tests.helpers.waiting import until

RETRY = 0.01


class Seen:
    """The pods that a source last reported."""

    def __init__(self, source: KubernetesSource) -> None:
        self._source = source
        self.pods: Sequence[PodSettings] = ()
        self.polls = self.updates = 0

    async def watch(self) -> None:
        while True:
            pods = await self._source.poll()
            self.polls += 1
            if pods is not None:
                self.pods, self.updates = pods, self.updates + 1

    @property
    def names(self) -> list[str]:
        return [pod.name.removeprefix("ns/") for pod in self.pods]

    @property
    def urls(self) -> list[str]:
        return [pod.url.removeprefix("http://") for pod in self.pods]


@asynccontextmanager
async def seen_by(server: FakeApiServer, **keys: Any) -> AsyncIterator[Seen]:
    settings = KubernetesSettings(server=server.url, **{"namespace": "ns", **keys})
    async with KubernetesSource(settings, SystemClock(), random.Random(1), RETRY) as source:
        seen = Seen(source)
        following = asyncio.get_running_loop().create_task(seen.watch())
        try:
            yield seen
        finally:
            following.cancel()
            await asyncio.wait([following])


@asynccontextmanager
async def one_pod(item: Object, **keys: Any) -> AsyncIterator[PodSettings]:
    """As the source makes it of the object."""
    async with FakeApiServer() as server:
        server.put(pods_in(), item)
        async with seen_by(server, **{"selector": "app=vllm", **keys}) as seen:
            await until(lambda: seen.updates)
            assert len(seen.pods) == 1
            yield seen.pods[0]


async def test_a_pod_has_the_properties_of_its_labels_and_annotations() -> None:
    annotations = {"kvlane/weight": "2.5", "kvlane/models": "m, n", "other": "x"}
    item = pod("a", "10.0.0.7", labels={"llm-d.ai/role": "decode"}, annotations=annotations)
    async with one_pod(item, role="prefill", weight=7, models=("x",), labels={"app": "old", "team": "t"}) as found:
        assert (found.name, found.url, found.uid) == ("ns/a", "http://10.0.0.7:8000", "uid-of-a")
        assert (found.role, found.weight, found.models) == ("", 2.5, ("m", "n"))
        assert found.labels == {
            "app": "vllm",
            "team": "t",
            "llm-d.ai/role": "decode",
            "kubernetes.io/hostname": "node-a",
        }


async def test_a_pod_knows_the_address_of_its_node() -> None:
    item = pod("a", "10.0.0.7")
    item["status"]["hostIP"] = "10.1.0.1"
    async with one_pod(item) as found:
        assert found.labels["status.hostIP"] == "10.1.0.1"


async def test_missing_properties_come_from_the_settings() -> None:
    keys = {"role": "prefill", "weight": 7, "models": ("x",), "engine": "sglang", "api_key": "k", "ports": (9000,)}
    async with one_pod(pod("a", "fd00::1"), scheme="https", **keys) as found:
        assert (found.url, found.role, found.weight) == ("https://[fd00::1]:9000", "prefill", 7)
        assert (found.models, found.engine, found.api_key) == (("x",), "sglang", "k")


@pytest.mark.parametrize("weight", ["heavy", "-1", "0", "nan", "inf"])
async def test_an_invalid_weight_is_logged_and_ignored(weight: str, caplog: pytest.LogCaptureFixture) -> None:
    async with one_pod(pod("a", annotations={"kvlane/weight": weight})) as found:
        assert found.weight == 1.0
    assert f"pod a: the annotation kvlane/weight is not a weight: '{weight}'" in caplog.text


@pytest.mark.parametrize(
    "item",
    [
        pod("x", ready=False),
        pod("x", deleting=True),
        pod("x", address=""),
        pod("x", phase="Failed"),
        pod("x", phase="Succeeded"),
        {"metadata": {"name": "x", "labels": {"app": "vllm"}}},
    ],
)
async def test_a_pod_that_is_not_ready_or_ends_or_has_no_address_is_left_out(item: Object) -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), item)
        server.put(pods_in(), pod("a", "10.0.0.9"))
        async with seen_by(server, selector="app=vllm") as seen:
            await until(lambda: seen.updates)
            assert seen.names == ["a"]


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("metadata", "uid", 5),
        ("metadata", "creationTimestamp", 5),
        ("metadata", "creationTimestamp", {}),
        ("metadata", "labels", {"app": "vllm", "x": 5}),
        ("metadata", "annotations", {"kvlane/weight": 5}),
        ("status", "podIP", 5),
        ("status", "podIP", ["10.0.0.1"]),
        ("status", "podIP", "no address"),
        ("status", "hostIP", 5),
        ("spec", "nodeName", 5),
    ],
)
async def test_a_pod_with_a_field_of_another_type_is_skipped_and_the_others_are_found(
    part: str, field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeApiServer() as server:
        item = pod("x", "10.0.0.8")
        item.setdefault(part, {})[field] = value
        server.put(pods_in(), item)
        server.put(pods_in(), pod("a", "10.0.0.9"))
        async with seen_by(server, selector="app=vllm") as seen:
            await until(lambda: seen.names == ["a"])
            server.put(pods_in(), pod("b", "10.0.0.10"))
            await until(lambda: seen.names == ["a", "b"])
            server.put(pods_in(), pod("x", "10.0.0.8"))
            await until(lambda: seen.names == ["a", "b", "x"])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"ports": [{"port": "x"}]},
        {"ports": [{"port": 70000}]},
        {"endpoints": [{"addresses": [5]}]},
        {"endpoints": [{"addresses": ["10.0.0.8"], "targetRef": {"name": 5}}]},
        {"endpoints": [{"addresses": ["10.0.0.8"], "targetRef": {"uid": []}}]},
        {"endpoints": [{"addresses": ["10.0.0.8"], "zone": 5}]},
        {"endpoints": ["x"]},
    ],
)
async def test_a_slice_with_a_field_of_another_type_is_skipped_and_the_others_are_found(change: Object) -> None:
    async with FakeApiServer() as server:
        server.put(slices_in(), {**endpoint_slice("x", endpoint("x", "10.0.0.8")), **change})
        server.put(slices_in(), endpoint_slice("s", endpoint("a", "10.0.0.9")))
        async with seen_by(server, service="vllm") as seen:
            await until(lambda: seen.names == ["a"])


@pytest.mark.parametrize("change", [{"selector": {"matchLabels": {"app": 5}}}, {"targetPorts": [{"number": "x"}]}])
async def test_an_inference_pool_with_a_field_of_another_type_keeps_its_last_state(change: Object) -> None:
    async with FakeApiServer() as server:
        server.put(pools_in(), pool("p", {"app": "vllm"}, 9000))
        server.put(pods_in(), pod("a", "10.0.0.9"))
        async with seen_by(server, inference_pool="p") as seen:
            await until(lambda: seen.urls == ["10.0.0.9:9000"])
            broken = pool("p", {"app": "vllm"}, 9000)
            broken["spec"].update(change)
            server.put(pools_in(), broken)
            server.put(pods_in(), pod("b", "10.0.0.10"))
            await until(lambda: seen.urls == ["10.0.0.9:9000", "10.0.0.10:9000"])


async def test_a_pod_is_added_when_ready_and_removed_when_deleted() -> None:
    async with FakeApiServer() as server, seen_by(server, selector="app=vllm") as seen:
        await until(lambda: seen.updates)
        assert seen.names == []
        server.put(pods_in(), pod("a", ready=False))
        server.put(pods_in(), pod("b", "10.0.0.2"))
        await until(lambda: seen.names == ["b"])
        server.put(pods_in(), pod("a", "10.0.0.1"))
        await until(lambda: seen.names == ["a", "b"])
        server.put(pods_in(), pod("a", "10.0.0.1", deleting=True))
        await until(lambda: seen.names == ["b"])


async def test_of_two_pods_with_one_address_the_younger_counts() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("young", "10.0.0.1", born="2026-02-01T00:00:00Z"))
        server.put(pods_in(), pod("old", "10.0.0.1"))
        async with seen_by(server, selector="app=vllm") as seen:
            await until(lambda: seen.updates)
            assert seen.names == ["young"]


async def test_several_ports_are_several_endpoints_with_active_ones() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a", "10.0.0.1"))
        server.put(pods_in(), pod("b", "10.0.0.2", annotations={"llm-d.ai/active-ports": "8001, x, 9999"}))
        server.put(pods_in(), pod("c", "10.0.0.3", annotations={"inference.networking.k8s.io/active-ports": "8000"}))
        async with seen_by(server, selector="app=vllm", ports=(8000, 8001)) as seen:
            await until(lambda: seen.updates)
            assert seen.names == ["a-rank-0", "a-rank-1", "b-rank-1", "c-rank-0"]
            assert seen.urls == ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:8000"]


async def test_an_inference_pool_gives_selector_and_ports() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a", "10.0.0.1", labels={"tier": "x"}))
        server.put(pods_in(), pod("b", "10.0.0.2"))
        server.put(pools_in(), pool("llama", {"tier": "x", "app": "vllm"}, 8200, 8201))
        server.put(pools_in(), pool("other", {"app": "web"}, 80))
        async with seen_by(server, inference_pool="llama") as seen:
            await until(lambda: seen.updates)
            assert seen.names == ["a-rank-0", "a-rank-1"]
            server.put(pools_in(), pool("llama", {"tier": "x", "app": "vllm"}, 8200))
            await until(lambda: seen.urls == ["10.0.0.1:8200"])
            server.put(pools_in(), pool("llama", {"app": "vllm"}, 8200))
            await until(lambda: seen.names == ["a", "b"])
            assert [dict(request)["labelSelector"] for request in server.lists[-2:]] == ["app=vllm,tier=x", "app=vllm"]


async def test_while_a_pool_changes_its_selector_no_pod_is_missing() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a", "10.0.0.1", labels={"tier": "x"}))
        server.put(pools_in(), pool("llama", {"tier": "x"}, 8000))
        async with seen_by(server, inference_pool="llama") as seen:
            await until(lambda: seen.names == ["a"])
            server.statuses["pods"] = (500, "later")
            updates = seen.updates
            server.put(pools_in(), pool("llama", {"app": "vllm"}, 8000))
            await until(lambda: server.lists[-1].get("labelSelector") == "app=vllm" and seen.polls > updates)
            assert (seen.names, seen.updates) == (["a"], updates)
            server.statuses.clear()
            await until(lambda: seen.updates > updates)
            assert seen.names == ["a"]


async def test_without_its_inference_pool_there_are_no_pods(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a", "10.0.0.1"))
        async with seen_by(server, inference_pool="llama") as seen:
            await until(lambda: seen.updates)
            assert seen.names == []
            server.put(pools_in(), pool("llama", {"app": "vllm"}, 8000))
            await until(lambda: seen.names == ["a"])
            server.delete(pools_in(), "llama")
            await until(lambda: seen.names == [])
            server.put(pools_in(), pool("llama", {}, 8000))
            await until(lambda: "selects nothing" in caplog.text)
            assert seen.names == []
    assert "InferencePool llama does not exist" in caplog.text


async def test_slices_of_a_service_give_addresses_and_ports() -> None:
    async with FakeApiServer() as server:
        server.put(
            slices_in(),
            endpoint_slice(
                "one",
                endpoint("a", "10.0.0.1", ready=True, serving=True),
                endpoint("b", "10.0.0.2", ready=False),
                endpoint("c", "10.0.0.3"),
                endpoint("d", "10.0.0.4", ready=True, serving=True, terminating=True),
                ports=(8080,),
            ),
        )
        server.put(slices_in(), endpoint_slice("far", endpoint("z", "10.0.9.9"), service="web"))
        async with seen_by(server, service="vllm") as seen:
            await until(lambda: seen.updates)
            assert seen.urls == ["10.0.0.1:8080", "10.0.0.3:8080"]
            assert seen.pods[0].labels == {
                "team": "blue",
                "kubernetes.io/hostname": "node-a",
                "topology.kubernetes.io/zone": "z1",
            }
            assert all(request["where"] == slices_in() for request in server.lists)


async def test_an_endpoint_in_several_slices_is_one_pod_with_a_ready_ipv4_address_first() -> None:
    async with FakeApiServer() as server:
        server.put(slices_in(), endpoint_slice("a1", endpoint("a", "fd00::1")))
        server.put(slices_in(), endpoint_slice("a2", endpoint("a", "10.0.0.1")))
        server.put(slices_in(), endpoint_slice("b1", endpoint("b", "10.0.0.2", ready=False)))
        server.put(slices_in(), endpoint_slice("b2", endpoint("b", "10.0.0.2", ready=True)))
        async with seen_by(server, service="vllm") as seen:
            await until(lambda: seen.updates)
            assert seen.urls == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_with_a_selector_pods_of_a_service_have_roles() -> None:
    async with FakeApiServer() as server:
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")))
        labels, annotations = {"llm-d.ai/role": "decode"}, {"kvlane/weight": "3"}
        server.put(pods_in(), pod("a", "10.0.0.1", labels=labels, annotations=annotations))
        server.put(pods_in(), pod("b", "10.0.0.2", uid="uid-of-an-earlier-b"))
        async with seen_by(server, service="vllm", selector="app=vllm") as seen:
            await until(lambda: seen.updates)
            assert seen.names == ["a"]
            assert (seen.pods[0].labels["llm-d.ai/role"], seen.pods[0].weight) == ("decode", 3.0)
            server.put(pods_in(), pod("b", "10.0.0.2"))
            await until(lambda: seen.names == ["a", "b"])


async def test_an_unreachable_api_server_removes_no_pods() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a", "10.0.0.1"))
        async with seen_by(server, selector="app=vllm") as seen:
            await until(lambda: seen.names == ["a"])
            await server.stop_listening()
            server.put(pods_in(), pod("b", "10.0.0.2"))
            await asyncio.sleep(0.1)
            assert seen.names == ["a"]
            await server.listen()
            await until(lambda: seen.names == ["a", "b"])


async def test_a_failed_first_list_does_not_block() -> None:
    async with FakeApiServer() as server:
        server.statuses["pods"] = (403, "forbidden")
        async with seen_by(server, selector="app=vllm") as seen:
            await until(lambda: seen.polls)
            assert not seen.updates


async def test_names_have_the_namespace_unless_it_is_the_proxys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.kubernetes.settings.ApiServer.own_namespace", lambda access: "ns")
    async with one_pod(pod("a"), namespace="") as found:
        assert found.name == "a"


async def test_a_pod_of_the_same_name_with_another_uid_is_another_pod() -> None:
    gone: list[str] = []
    fleet = Fleet(SystemClock(), on_removed=lambda endpoint: gone.append(endpoint.url))
    first = fleet.add(PodSettings("http://10.0.0.1:8000", "vllm-0", uid="1"))
    first.charge(1, 0)
    assert fleet.add(PodSettings("http://10.0.0.1:8000", "vllm-0", uid="1")) is first
    second = fleet.add(PodSettings("http://10.0.0.1:8000", "vllm-0", uid="2"))
    assert second is not first
    assert (gone, fleet.endpoints) == (["http://10.0.0.1:8000"], [second])
    assert first.state is EndpointState.GONE


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({}, "pods.kubernetes: names no pods"),
        ({"inferencePool": "p", "selector": "a=b"}, "take selector and service out"),
        ({"selector": "a in b"}, "selector: 'a in b' is not a selector"),
        ({"selector": "a=b", "ports": [0]}, "ports: must be different ones"),
        ({"selector": "a=b", "ports": [80, 80]}, "ports: must be different ones"),
        ({"service": "a", "server": "kube"}, "server: 'kube' is not a URL"),
        ({"service": "a", "nameSpace": "x"}, "did you mean 'namespace'?"),
    ],
)
def test_contradictory_settings_are_refused(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(KubernetesSettings, given, "pods.kubernetes")
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "selector", ["a", "!a", "a=b", "a==b,c!=d", "x.io/a-b in (c, d),e notin (f)", "a=", " a = b , c "]
)
def test_selectors_match_like_those_of_kubernetes(selector: str) -> None:
    assert load(KubernetesSettings, {"selector": selector}).selector == selector
