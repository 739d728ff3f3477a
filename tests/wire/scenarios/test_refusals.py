"""What the data port does not let through, and where the admin port lets it."""

from __future__ import annotations

import hashlib
import json

import pytest
from yarl import URL

from proxy.lab.sim import SimConfig
from proxy.lab.sim.faults import Fault, FaultKind
from tests.helpers.scenarios.stack import CHAT, stack

CONTROL = (
    "/metrics",
    "/load",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/scale_elastic_ep",
    "/collective_rpc",
    "/start_profile",
    "/abort_requests",
    "/admin/requests",
    "/admin/reset",
)


async def test_the_access_log_says_why_a_request_was_refused_and_for_which_model(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with stack(1, settings={"telemetry": {"accessLog": True}}) as s:
        response, payload = await s.post(CHAT, {"model": "nope", "messages": []})
        await s.idle()
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert response.status == line["status"] == 404
    assert (line["model"], line["error"]) == ("nope", payload["error"]["message"])
    assert line["attempts"] == 0


async def test_a_request_for_a_pod_with_its_prompt_is_refused_until_one_has_it() -> None:
    plugins = [{"type": kind} for kind in ("header-profile-handler", "prefix-cache-scorer")]
    decode = {"name": "decode", "plugins": [{"pluginRef": "prefix-cache-scorer"}]}
    scheduling = {"plugins": plugins, "schedulingProfiles": [decode, {"name": "prefill"}]}
    body = {"model": "sim", "messages": [{"role": "user", "content": "a long prompt " * 100}], "max_tokens": 1}
    async with stack(2, settings={"scheduling": scheduling}) as s:
        refused, payload = await s.post(CHAT, body, {"prefer": "if-available", "epp-profile": "decode"})
        assert (refused.status, refused.headers["x-kvlane-reason"]) == (412, "not-cached")
        assert payload["error"]["code"] == "not_cached"
        assert not any(pod.requests for pod in s.pods)
        first, _ = await s.post(CHAT, body)
        second, _ = await s.post(CHAT, body, {"prefer": "if-available"})
        assert (first.status, second.status) == (200, 200)
        assert first.headers["x-kvlane-endpoint"] == second.headers["x-kvlane-endpoint"]


async def test_the_access_log_has_the_failure_of_the_pod_or_the_refusal_of_the_fallback_after_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = {"telemetry": {"accessLog": True}, "models": {"fallbacks": {"big": ["small"]}}}
    async with stack(2, [SimConfig(model="big"), SimConfig(model="small")], settings) as s:
        for pod in s.pods:
            pod.faults.set([Fault(FaultKind.GARBAGE)])
        await s.post(CHAT, {"model": "small", "messages": []})
        await s.idle()
        await s.operate("POST", "/admin/pods/pod-1/drain")
        _, payload = await s.post(CHAT, {"model": "big", "messages": []})
        await s.idle()
    failed, refused = map(json.loads, capfd.readouterr().out.splitlines())
    assert (failed["outcome"], failed["endpoint"]) == ("upstream-failed", "pod-1")
    assert "HTTP" in failed["error"]
    assert (refused["outcome"], refused["endpoint"]) == ("rejected-no-endpoints", "pod-0")
    assert refused["error"] == payload["error"]["message"]


async def test_an_unknown_path_is_not_found_and_reaches_no_pod() -> None:
    async with stack(1) as s:
        for path in ("/", "/v1", "/v1/nope", "/v1/chat/completions/", "/v1/files", "/v1//chat/completions", "/docs"):
            for method in ("GET", "POST", "DELETE"):
                async with s.http.request(method, s.url + path) as response:
                    assert response.status == 404, path
                    assert response.headers["x-kvlane-reason"] == "unknown-path"
                    assert (await response.json())["error"]["type"] == "invalid_request_error"
        assert not len(s.pods[0].requests)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", CHAT, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models/sim", "GET, HEAD"),
        ("PUT", "/v1/responses", "POST"),
        ("GET", "/v1/responses/resp_1/cancel", "POST"),
        ("POST", "/v1/realtime", "GET"),
        ("PATCH", "/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(method: str, path: str, allowed: str) -> None:
    async with stack(1) as s, s.http.request(method, s.url + path) as response:
        assert response.status == 405
        assert response.headers["allow"] == allowed
        assert (await response.json())["error"]["code"] == "method_not_allowed"
        assert not len(s.pods[0].requests)


async def test_control_paths_of_a_pod_are_refused_on_the_data_port_in_every_spelling() -> None:
    async with stack(1) as s:
        for path in CONTROL:
            for spelling in (path, path + "/", path + "?x=1", "//" + path[1:], path.replace("/", "/%2e/", 1)):
                async with s.http.post(URL(s.url + spelling, encoded=True), json={}) as response:
                    assert response.status == 404, spelling
        assert not len(s.pods[0].requests)


async def test_control_paths_are_refused_under_a_covering_extension() -> None:
    async with stack(1, settings={"security": {"relayPaths": ["/*", "/extra"]}}) as s:
        for path in CONTROL[:12]:
            async with s.http.post(s.url + path, json={}) as response:
                assert response.status == 404, path
        async with s.http.post(s.url + "/extra", json={"model": "sim"}) as response:
            assert response.status == 404
        assert [record.path for record in s.pods[0].requests] == ["/extra"]


async def test_an_extension_is_relayed_with_its_method() -> None:
    async with stack(1, settings={"security": {"relayPaths": ["/extra/*"]}}) as s:
        for method in ("GET", "DELETE"):
            async with s.http.request(method, s.url + "/extra/thing?a=1") as response:
                assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
        seen = [(record.method, record.path) for record in s.pods[0].requests]
        assert seen == [("GET", "/extra/thing"), ("DELETE", "/extra/thing")]


async def test_control_paths_are_reached_per_pod_through_the_admin_port() -> None:
    async with stack(2) as s:
        await s.chat()
        for pod in s.pods:
            name = f"pod-{s.pods.index(pod)}"
            async with s.http.get(f"{s.admin}/admin/pods/{name}/proxy/metrics") as response:
                assert "vllm:num_requests_running" in await response.text()
            response, state = await s.operate("GET", f"/admin/pods/{name}/proxy/admin/requests")
            assert response.status == 200
            assert len(state) == len(pod.requests)


async def test_the_admin_key_protects_everything_except_probes_and_metrics() -> None:
    async with stack(1, settings={"admin": {"port": 0, "apiKey": "secret"}}) as s:
        for path in ("/metrics", "/healthz", "/readyz"):
            async with s.http.get(s.admin + path) as response:
                assert response.status == 200, path
        for path in ("/admin/pods", "/admin/config", "/admin/pods/pod-0/proxy/metrics", "/nope"):
            async with s.http.get(s.admin + path) as response:
                assert response.status == 401, path
        async with s.http.get(s.admin + "/admin/config", headers={"authorization": "Bearer secret"}) as response:
            assert response.status == 200
            assert "secret" not in await response.text()


async def test_the_admin_port_shows_the_configuration_with_origins() -> None:
    async with stack(1) as s:
        _, config = await s.operate("GET", "/admin/config")
        assert config["listen"]["host"] == {"value": "127.0.0.1", "origin": "file"}
        assert config["listen"]["maxBody"] == {"value": 64 * 1024 * 1024, "origin": "default"}
        assert {plugin["origin"] for plugin in config["scheduling"]["plugins"]} == {"injected"}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model": "sim", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": 5, "messages": []}',
        b'{"model": "sim", "messages": [3]}',
        b'"text"',
        b"null",
        b"\xff\xfe",
        b'{"model": "sim"',
    ],
    ids=["too deep", "model", "message", "text", "null", "no text", "half"],
)
async def test_invalid_input_is_the_clients_fault_and_the_process_continues(raw: bytes) -> None:
    async with stack(1) as s:
        async with s.http.post(s.url + CHAT, data=raw) as response:
            assert response.status == 400
            assert response.headers["x-kvlane-reason"] == "invalid-request"
            assert (await response.json())["error"]["message"]
        assert (await s.chat())[0].status == 200


async def test_a_value_of_another_type_is_left_to_the_engine() -> None:
    raw = b'{"model": "sim", "messages": [], "stream": "yes"}'
    async with stack(1) as s:
        async with s.http.post(s.url + CHAT, data=raw) as response:
            await response.read()
            assert "x-kvlane-endpoint" in response.headers
        assert s.pods[0].requests[-1].body_sha256 == hashlib.sha256(raw).hexdigest()


async def test_a_refusal_does_not_repeat_an_endless_id_of_a_response() -> None:
    body = {"model": "sim", "input": "Go on", "previous_response_id": "resp_" + "x" * 100_000}
    async with stack(2) as s, s.http.post(s.url + "/v1/responses", json=body) as response:
        assert response.status == 404
        assert len(await response.read()) < 1000
