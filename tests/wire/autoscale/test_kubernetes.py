"""The actuator of Kubernetes, against a small API server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.autoscale.actuators import DELETION_COST, Kubernetes
from proxy.autoscale.loop import ScalingOutcome
from proxy.autoscale.settings import path_of
from proxy.core.endpoint import RANK_LABEL, Endpoint
from proxy.kubernetes.settings import ApiServer
from tests.helpers.autoscale.orders import order


class FakeApiServer:
    """One Deployment with its scale, and pods that have annotations."""

    def __init__(self) -> None:
        self.replicas = 3
        self.version = 1
        self.token = "first"
        self.changed_meanwhile = False
        self.patches = 0
        self.annotations: dict[str, dict[str, str]] = {"d-0": {}, "d-1": {}}
        self.app = web.Application()
        self.app.router.add_get("/apis/apps/v1/namespaces/ns/deployments/decode/scale", self.get)
        self.app.router.add_patch("/apis/apps/v1/namespaces/ns/deployments/decode/scale", self.patch)
        self.app.router.add_patch("/api/v1/namespaces/ns/pods/{pod}", self.annotate)

    def _scale(self) -> web.Response:
        scale = {
            "kind": "Scale",
            "metadata": {"resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas},
        }
        return web.json_response(scale)

    def _check(self, request: web.Request) -> None:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized(text='{"kind": "Status"}')

    async def get(self, request: web.Request) -> web.Response:
        self._check(request)
        reply = self._scale()
        self.version += self.changed_meanwhile
        return reply

    async def patch(self, request: web.Request) -> web.Response:
        self._check(request)
        assert request.content_type == "application/merge-patch+json"
        body: dict[str, Any] = await request.json()
        if body["metadata"]["resourceVersion"] != str(self.version):
            raise web.HTTPConflict(text='{"kind": "Status"}')
        self.replicas, self.version, self.patches = body["spec"]["replicas"], self.version + 1, self.patches + 1
        return self._scale()

    async def annotate(self, request: web.Request) -> web.Response:
        self._check(request)
        pod = request.match_info["pod"]
        if pod not in self.annotations:
            raise web.HTTPNotFound(text='{"kind": "Status"}')
        self.annotations[pod] |= (await request.json())["metadata"]["annotations"]
        return web.json_response({"kind": "Pod"})


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[FakeApiServer, Kubernetes, Path]]:
    server, token = FakeApiServer(), tmp_path / "token"
    token.write_text("first\n")
    async with TestServer(server.app) as running:
        url = str(running.make_url("/"))
        yield server, Kubernetes({"decode": "deployment/decode"}, 5.0, ApiServer(url, "ns", str(token))), token


async def test_the_scale_is_patched_only_if_it_differs(api: tuple[FakeApiServer, Kubernetes, Path]) -> None:
    server, kubernetes, _ = api
    assert await kubernetes.scale(order(5)) is ScalingOutcome.OK
    assert server.replicas == 5
    assert await kubernetes.scale(order(5)) is ScalingOutcome.OK
    assert server.patches == 1


async def test_a_conflicting_change_is_left_for_the_next_time(
    api: tuple[FakeApiServer, Kubernetes, Path],
) -> None:
    server, kubernetes, _ = api
    server.changed_meanwhile = True
    assert await kubernetes.scale(order(5)) is ScalingOutcome.BUSY
    assert server.replicas == 3
    server.changed_meanwhile = False
    assert await kubernetes.scale(order(5)) is ScalingOutcome.OK


async def test_the_token_is_read_again(api: tuple[FakeApiServer, Kubernetes, Path]) -> None:
    server, kubernetes, token = api
    server.token = "second"
    assert await kubernetes.scale(order(5)) is ScalingOutcome.REFUSED
    token.write_text("second")
    assert await kubernetes.scale(order(5)) is ScalingOutcome.OK


async def test_a_missing_target_is_refused(api: tuple[FakeApiServer, Kubernetes, Path]) -> None:
    _, kubernetes, _ = api
    other = Kubernetes({"decode": "deployment/other"}, 5.0, kubernetes.access)
    assert await other.scale(order(5)) is ScalingOutcome.REFUSED


async def test_victims_get_a_deletion_cost_and_lose_it(
    api: tuple[FakeApiServer, Kubernetes, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, kubernetes, _ = api
    await kubernetes.mark(["ns/d-1", "gone"], doomed=True)
    assert server.annotations == {"d-0": {}, "d-1": {DELETION_COST: "-1000"}}
    assert "gone" in caplog.text
    caplog.clear()
    await kubernetes.mark(["d-1", "gone"], doomed=False)
    assert server.annotations["d-1"] == {DELETION_COST: "0"}
    assert not caplog.text


async def test_a_replica_with_a_port_for_each_rank_is_marked_by_the_name_of_its_pod(
    api: tuple[FakeApiServer, Kubernetes, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, kubernetes, _ = api
    server.annotations |= {"e-rank-1": {}, "e": {}}
    ranks = [Endpoint(f"ns/d-0-rank-{rank}", labels={RANK_LABEL: str(rank)}) for rank in range(2)]
    await kubernetes.mark([ranks[1].replica_name, Endpoint("ns/e-rank-1").replica_name], doomed=True)
    assert server.annotations["d-0"] == server.annotations["e-rank-1"] == {DELETION_COST: "-1000"}
    assert server.annotations["e"] == {}
    assert not caplog.text


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("Deployment/a", ("apps/v1/deployments", "a")),
        ("statefulset/a", ("apps/v1/statefulsets", "a")),
        ("leaderworkerset.x-k8s.io/v1/leaderworkersets/a", ("leaderworkerset.x-k8s.io/v1/leaderworkersets", "a")),
    ],
)
def test_anything_with_a_scale_is_a_target(target: str, path: tuple[str, str]) -> None:
    assert path_of(target) == path


@pytest.mark.parametrize("target", ["a", "deployment/", "pod/a", "v1/pods/a"])
def test_an_invalid_target_is_reported(target: str) -> None:
    with pytest.raises(ValueError, match="is no target"):
        path_of(target)
