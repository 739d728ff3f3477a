"""Which pods a cluster has while its objects change, in the orders that clusters are known for."""

from __future__ import annotations

import pytest

from tests.helpers.kubernetes.server import (
    FakeApiServer,
    endpoint,
    endpoint_slice,
    pod,
    pods_in,
    pool,
    pools_in,
    slices_in,
)
from tests.helpers.waiting import until
from tests.wire.fleet.test_kubernetes import seen_by


async def test_the_late_removal_of_a_pod_keeps_the_successor_at_its_address() -> None:
    async with FakeApiServer() as server, seen_by(server, selector="app=vllm") as seen:
        server.put(pods_in(), pod("old", "10.0.0.1"))
        await until(lambda: seen.names == ["old"])
        server.put(pods_in(), pod("new", "10.0.0.1", born="2026-02-01T00:00:00Z"))
        await until(lambda: seen.names == ["new"])
        updates = seen.updates
        server.put(pods_in(), pod("old", "10.0.0.1", deleting=True))
        await until(lambda: seen.updates > updates)
        assert seen.names == ["new"]
        server.delete(pods_in(), "old")
        server.put(pods_in(), pod("other", "10.0.0.2"))
        await until(lambda: "other" in seen.names)
        assert (seen.names, seen.urls) == (["new", "other"], ["10.0.0.1:8000", "10.0.0.2:8000"])
        assert seen.pods[0].uid == "uid-of-new"


async def test_a_recreated_pod_of_a_set_has_its_address_before_the_old_one_is_removed() -> None:
    """Of slices: the old one still stands in one as terminating, the new one comes in another."""
    async with FakeApiServer() as server, seen_by(server, service="vllm") as seen:
        server.put(slices_in(), endpoint_slice("one", endpoint("vllm-0", "10.0.0.1")))
        await until(lambda: seen.urls == ["10.0.0.1:8000"])
        ending = endpoint("vllm-0", "10.0.0.1", ready=False, serving=True, terminating=True)
        returned = endpoint("vllm-0", "10.0.0.2")
        returned["targetRef"]["uid"] = "second"
        server.put(slices_in(), endpoint_slice("two", returned))
        server.put(slices_in(), endpoint_slice("one", ending))
        await until(lambda: seen.urls == ["10.0.0.2:8000"] and seen.pods[0].uid == "second")
        server.delete(slices_in(), "one")
        server.put(slices_in(), endpoint_slice("three", endpoint("vllm-1", "10.0.0.1")))
        await until(lambda: seen.urls == ["10.0.0.2:8000", "10.0.0.1:8000"])


async def test_slices_of_a_service_are_added_changed_and_removed() -> None:
    async with FakeApiServer() as server, seen_by(server, service="vllm") as seen:
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")))
        server.put(slices_in(), endpoint_slice("two", endpoint("c", "10.0.0.3")))
        await until(lambda: seen.names == ["a", "b", "c"])
        server.put(slices_in(), endpoint_slice("three", endpoint("b", "10.0.0.2"), endpoint("d", "10.0.0.4")))
        await until(lambda: seen.names == ["a", "b", "c", "d"])
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1")))
        server.delete(slices_in(), "two")
        await until(lambda: seen.names == ["a", "b", "d"])
        server.delete(slices_in(), "one")
        server.delete(slices_in(), "three")
        await until(lambda: seen.names == [])


async def test_pods_at_the_address_of_their_node_differ_by_port() -> None:
    async with FakeApiServer() as server, seen_by(server, service="vllm") as seen:
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1")))
        server.put(slices_in(), endpoint_slice("two", endpoint("b", "10.0.0.1"), ports=(8100,)))
        await until(lambda: seen.names == ["a", "b"])
        assert seen.urls == ["10.0.0.1:8000", "10.0.0.1:8100"]


async def test_an_endpoint_without_an_address_is_skipped() -> None:
    async with FakeApiServer() as server, seen_by(server, service="vllm") as seen:
        unaddressed = {**endpoint("a", ""), "addresses": []}
        server.put(slices_in(), endpoint_slice("one", unaddressed, endpoint("b", "10.0.0.2")))
        await until(lambda: seen.names == ["b"])
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")))
        await until(lambda: seen.names == ["a", "b"])


@pytest.mark.parametrize(
    ("conditions", "is_wanted"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"serving": True}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),
        ({"terminating": True}, False),
    ],
)
async def test_changed_conditions_of_an_endpoint_apply(conditions: dict[str, bool], is_wanted: bool) -> None:
    """With publishNotReadyAddresses a terminating one is reported ready."""
    async with FakeApiServer() as server, seen_by(server, service="vllm") as seen:
        first = endpoint("a", "10.0.0.1", ready=not is_wanted)
        server.put(slices_in(), endpoint_slice("one", first, endpoint("b", "10.0.0.2")))
        await until(lambda: seen.names == (["b"] if is_wanted else ["a", "b"]))
        server.put(
            slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1", **conditions), endpoint("b", "10.0.0.2"))
        )
        await until(lambda: seen.names == (["a", "b"] if is_wanted else ["b"]))


@pytest.mark.parametrize("selector", ["", "app=vllm"])
async def test_named_ports_may_have_different_numbers_per_pod(selector: str) -> None:
    """In a rollout that changes it, the cluster keeps a slice for each number."""
    async with FakeApiServer() as server, seen_by(server, service="vllm", selector=selector) as seen:
        server.put(pods_in(), pod("a", "10.0.0.1"))
        server.put(pods_in(), pod("b", "10.0.0.2"))
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1"), ports=(8000,)))
        server.put(slices_in(), endpoint_slice("two", endpoint("b", "10.0.0.2"), ports=(9000,)))
        await until(lambda: seen.urls == ["10.0.0.1:8000", "10.0.0.2:9000"])
        assert seen.names == ["a", "b"]
        server.put(slices_in(), endpoint_slice("one", endpoint("a", "10.0.0.1"), ports=(8000, 8001)))
        await until(lambda: seen.names == ["a-rank-0", "a-rank-1", "b"])
        server.put(slices_in(), endpoint_slice("two", endpoint("b", "10.0.0.2"), ports=()))
        await until(lambda: seen.urls[-1] == "10.0.0.2:8000")


async def test_ranks_are_added_and_removed_by_the_annotation_and_keep_their_names() -> None:
    async with FakeApiServer() as server, seen_by(server, inference_pool="llama") as seen:
        server.put(pools_in(), pool("llama", {"app": "vllm"}, 8000, 8001, 8002, 8003))
        server.put(pods_in(), pod("a", "10.0.0.1"))
        await until(lambda: seen.names == [f"a-rank-{rank}" for rank in range(4)])
        active = {"inference.networking.k8s.io/active-ports": "8001,8003"}
        server.put(pods_in(), pod("a", "10.0.0.1", annotations=active))
        await until(lambda: seen.names == ["a-rank-1", "a-rank-3"])
        assert seen.urls == ["10.0.0.1:8001", "10.0.0.1:8003"]
        server.put(pods_in(), pod("a", "10.0.0.1", annotations={**active, "llm-d.ai/active-ports": ""}))
        await until(lambda: seen.names == [])
        server.put(pods_in(), pod("a", "10.0.0.1"))
        await until(lambda: len(seen.names) == 4)
        assert {one.uid for one in seen.pods} == {"uid-of-a"}


async def test_pools_and_pods_of_one_name_in_two_namespaces_are_separate() -> None:
    async with FakeApiServer() as server:
        for namespace, address, port in (("ns", "10.0.0.1", 8000), ("other", "10.0.0.2", 9000)):
            server.put(pods_in(namespace), pod("a", address, uid=f"of-{namespace}"))
            server.put(pools_in(namespace), pool("llama", {"app": "vllm"}, port))
        async with (
            seen_by(server, inference_pool="llama") as near,
            seen_by(server, inference_pool="llama", namespace="other") as far,
        ):
            await until(lambda: near.urls == ["10.0.0.1:8000"] and far.urls == ["10.0.0.2:9000"])
            assert [near.pods[0].name, far.pods[0].name] == ["ns/a", "other/a"]
            server.put(pools_in("other"), pool("llama", {"app": "web"}, 9000))
            await until(lambda: far.urls == [])
            server.delete(pods_in("other"), "a")
            server.delete(pools_in("other"), "llama")
            server.put(pods_in(), pod("b", "10.0.0.3"))
            await until(lambda: near.urls == ["10.0.0.1:8000", "10.0.0.3:8000"])
