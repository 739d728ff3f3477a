"""The address of the API server and the credentials for it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.core.errors import ConfigError
from proxy.core.params import load
from proxy.kubernetes import settings
from proxy.kubernetes.api import Api, ApiError, Resource
from proxy.kubernetes.settings import ApiServer
from tests.helpers.http.authority import Authority, server_context
from tests.helpers.kubernetes.server import FakeApiServer, pod, pods_in

PODS = Resource("", "v1", "pods")


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that Kubernetes puts into every container."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("of-the-pod\n")
    (folder / "namespace").write_text("ns\n")
    monkeypatch.setattr(settings, "SERVICE_ACCOUNT", folder)
    return folder


def in_cluster_of(server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    """What is not given is that of the cluster, whose server this is."""
    at = urlsplit(server.url)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(at.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", str(at.port))
    return ApiServer()


async def test_in_a_pod_no_settings_are_needed(account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "of-the-cluster")
    (account / "ca.crt").write_text(authority.file.read_text())
    async with FakeApiServer(server_context(authority.issue("server"))) as server:
        server.token = "of-the-pod"
        server.put(pods_in("ns"), pod("a"))
        found = await Api(in_cluster_of(server, monkeypatch)).list(PODS, {})
        assert [item["metadata"]["name"] for item in found.items] == ["a"]


async def test_an_untrusted_server_gets_no_token(
    account: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (account / "ca.crt").write_text(Authority(tmp_path / "of-the-cluster").file.read_text())
    another = Authority(tmp_path / "another")
    async with FakeApiServer(server_context(another.issue("server"))) as server:
        with pytest.raises(ApiError, match="certificate"):
            await Api(in_cluster_of(server, monkeypatch)).list(PODS, {})
        assert not server.lists


async def test_outside_of_a_pod_the_missing_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "SERVICE_ACCOUNT", tmp_path / "none")
    with pytest.raises(ApiError, match="none/token"):
        await Api(ApiServer(namespace="ns")).list(PODS, {})


def test_a_configured_server_does_not_get_the_token_of_the_pod(account: Path) -> None:
    assert "authorization" not in ApiServer(server="http://127.0.0.1:8001").headers()
    assert ApiServer().headers()["authorization"] == "Bearer of-the-pod"


@pytest.mark.parametrize(
    ("host", "url"), [("10.0.0.1", "https://10.0.0.1:6443"), ("fd00::1", "https://[fd00::1]:6443")]
)
def test_the_server_comes_from_kubernetes(host: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", "6443")
    assert ApiServer().url == url


def test_an_invalid_server_url_is_refused_with_its_path() -> None:
    with pytest.raises(ConfigError) as caught:
        load(ApiServer, {"server": "kubernetes.default"}, "pods.kubernetes")
    assert "pods.kubernetes.server: 'kubernetes.default' is not a URL" in str(caught.value)


def test_core_kinds_have_another_path_than_grouped_ones() -> None:
    assert PODS.path("ns") == "/api/v1/namespaces/ns/pods"
    slices = Resource("discovery.k8s.io", "v1", "endpointslices")
    assert slices.path("ns") == "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
