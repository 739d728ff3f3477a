"""Which paths the data port knows."""

from __future__ import annotations

import pytest

from proxy.core.errors import ConfigError, MethodNotAllowed, NotFound
from proxy.core.params import load
from proxy.http.paths import CONTROL, INFERENCE, PathKind, Paths, split_target
from proxy.http.settings import ListenSettings, SecuritySettings


@pytest.mark.parametrize("path", INFERENCE)
def test_inference_paths_are_relayed(path: str) -> None:
    assert Paths().route("POST", path).kind is PathKind.RELAY


@pytest.mark.parametrize(
    "path",
    ["/v2/embed", "/generative_scoring", "/v1/chat/completions/derender", "/v1/completions/derender"],
)
def test_newer_paths_of_vllm_are_relayed(path: str) -> None:
    assert Paths().route("POST", path).kind is PathKind.RELAY


@pytest.mark.parametrize("path", sorted(CONTROL))
def test_control_paths_are_unknown_with_any_configuration(path: str) -> None:
    for paths in (Paths(), Paths(["/*"]), Paths(["/v1/*", "/inference/*"])):
        for spelling in (path, path + "/"):
            with pytest.raises(NotFound):
                paths.route("POST", spelling)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/chat/completions/",
        "/V1/chat/completions",
        "//v1/chat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/./chat/completions",
        "/v1/responses/../../metrics",
        "/v1/responses/%2e%2e",
        "/v1/responses/..",
        "/v1/responses/a/b",
        "/v1/responses/a%2Fcancel",
        "*",
    ],
)
def test_other_spellings_are_unknown(path: str) -> None:
    with pytest.raises(NotFound):
        Paths().route("POST", path)


def test_stored_responses_are_reached_with_their_methods() -> None:
    paths = Paths()
    for method, path in (
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
    ):
        assert paths.route(method, path).kind is PathKind.RELAY


def test_a_wrong_method_names_the_right_ones() -> None:
    with pytest.raises(MethodNotAllowed) as caught:
        Paths().route("PUT", "/v1/responses/resp_1")
    assert caught.value.allowed == ("GET", "DELETE")


def test_configured_paths_are_relayed() -> None:
    paths = Paths(["/v1/custom", "/plugins/*"])
    assert paths.route("POST", "/v1/custom").kind is PathKind.RELAY
    assert paths.route("GET", "/plugins/a/b").kind is PathKind.RELAY
    for path in ("/v1/custom/more", "/plugins", "/plugins/../metrics", "/plugins/%2e%2e/metrics", "/plugins//metrics"):
        with pytest.raises(NotFound):
            paths.route("GET", path)


@pytest.mark.parametrize("path", ["custom", "/a?b", "/a/../b", "/sleep", "/v1/load_lora_adapter/", "/%6detrics"])
def test_forbidden_paths_are_refused_in_the_configuration(path: str) -> None:
    with pytest.raises(ConfigError, match="relayPaths"):
        load(SecuritySettings, {"relayPaths": [path]}, "security")


def test_settings_have_the_documented_defaults() -> None:
    listen = load(ListenSettings, {"maxBody": "1MiB"})
    assert (listen.host, listen.port, listen.max_body, listen.retained_bodies) == ("0.0.0.0", 8000, 2**20, 2**29)


def test_a_target_is_split_as_it_was_sent() -> None:
    assert split_target("/a?b?c") == ("/a", "?b?c")
    assert split_target("/a") == ("/a", "")
    assert split_target("HTTP://host:1/a?b") == ("/a", "?b")
    assert split_target("https://host") == ("/", "")


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/models", "Did you mean /v1/models?"),
        ("/v1/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/embedding", "Did you mean /v1/embeddings?"),
        ("/metrics", "It is on the admin port; only inference paths are served here."),
        ("/sleep", "It controls a pod; only inference paths are served here."),
        ("/v1/files", "It is not relayed to pods unless security.relayPaths names it."),
        ("/v1/images/generations", "It is not relayed to pods unless security.relayPaths names it."),
        ("/v1/moderations", "It is not relayed to pods unless security.relayPaths names it."),
        (
            "/v1/chat/completions/" + "x" * 65536,
            "It is not relayed to pods unless security.relayPaths names it.",
        ),
    ],
)
def test_an_unknown_path_gets_the_path_that_was_probably_meant(path: str, advice: str) -> None:
    with pytest.raises(NotFound) as caught:
        Paths().route("POST", path)
    assert str(caught.value) == f"No such path: {path}. {advice}"
