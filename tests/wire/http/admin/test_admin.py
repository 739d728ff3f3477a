from __future__ import annotations

import asyncio
import io
import logging
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.http.admin import LARGEST_BODY
from tests.helpers.http.admin.fakes import admin_port
from tests.helpers.waiting import until

KEY = {"authorization": "Bearer sesame"}


async def test_metrics_show_the_current_fleet() -> None:
    async with admin_port() as port:
        port.add("pod-a")
        async with port.client.get("/metrics") as response:
            families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    assert [sample.labels for sample in families["kvlane_endpoint_state"].samples] == [
        {"endpoint": "pod-a", "state": "ready"}
    ]


async def test_metrics_are_openmetrics_on_request() -> None:
    async with (
        admin_port() as port,
        port.client.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"}) as response,
    ):
        assert response.content_type == "application/openmetrics-text"
        assert (await response.text()).endswith("# EOF\n")


async def test_readiness_equals_accepting_new_requests() -> None:
    async with admin_port() as port:
        assert (await port.json("GET", "/readyz", 503))["pods"] == {"ready": 0, "total": 0}
        endpoint = port.add("pod-a")
        assert await port.json("GET", "/readyz") == {
            "ready": True,
            "stopping": False,
            "pods": {"ready": 1, "total": 1},
        }
        port.fleet.refused(endpoint)
        assert (await port.json("GET", "/readyz", 503))["pods"] == {"ready": 0, "total": 1}


async def test_a_stopping_proxy_is_alive_but_not_ready() -> None:
    async with admin_port() as port:
        port.add("pod-a")
        port.stopping = True
        assert (await port.json("GET", "/readyz", 503))["stopping"] is True
        assert await port.json("GET", "/healthz") == {"status": "ok"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer sesame2"},
        {"authorization": "Bearer"},
        {"authorization": "Basic sesame"},
        {"authorization": "Bearer sésame"},
    ],
)
async def test_without_the_key_admin_requests_are_refused(headers: dict[str, str]) -> None:
    async with admin_port("sesame") as port:
        port.add("pod-a")
        requests = [
            ("GET", "/admin/pods"),
            ("POST", "/admin/pods"),
            ("GET", "/admin/config"),
            ("DELETE", "/admin/pods/pod-a"),
            ("POST", "/admin/pods/pod-a/drain"),
            ("POST", "/admin/pods/pod-a/proxy/sleep"),
            ("GET", "/debug/anything"),
            ("GET", "/admin//pods"),
        ]
        for method, path in requests:
            error = await port.error(method, path, 401, headers=headers)
            assert error["code"] == "invalid_api_key"
        assert [endpoint.state.value for endpoint in port.fleet.endpoints] == ["ready"]


async def test_a_refusal_for_lack_of_a_key_explains_how_to_send_it() -> None:
    async with admin_port("sesame") as port, port.client.get("/admin/pods") as response:
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-kvlane-reason"] == "unauthorized"
        assert "sesame" not in await response.text()


async def test_probes_and_metrics_need_no_key() -> None:
    async with admin_port("sesame") as port:
        port.add("pod-a")
        for path in ("/healthz", "/readyz", "/metrics"):
            async with port.client.get(path) as response:
                assert response.status == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_with_the_key_admin_requests_are_served(scheme: str) -> None:
    async with admin_port("sesame") as port:
        assert await port.json("GET", "/admin/pods", headers={"authorization": f"{scheme} sesame"}) == {"pods": []}


async def test_a_key_beyond_ascii_works() -> None:
    async with admin_port("sésame") as port:
        await port.json("GET", "/admin/pods", headers={"authorization": "Bearer sésame"})


async def test_an_unknown_path_is_reported() -> None:
    async with admin_port() as port:
        error = await port.error("GET", "/admin/nothing", 404)
        assert error["message"] == "The admin port has no /admin/nothing."
        error = await port.error("POST", "/v1/chat/completions", 404)
        assert error["message"].endswith("Inference paths are on the data port.")


async def test_a_wrong_method_names_the_right_ones() -> None:
    async with admin_port() as port, port.client.put("/admin/pods") as response:
        assert response.status == 405
        assert response.headers["allow"] == "GET, HEAD, POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"


async def test_a_body_over_the_limit_is_refused() -> None:
    async with admin_port() as port:
        error = await port.error("POST", "/admin/pods", 413, data=io.BytesIO(bytes(LARGEST_BODY + 1)))
        assert error["code"] == "body_too_large"


async def test_a_defect_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
    async with admin_port() as port:
        port.config = {"unserialisable": object()}
        error = await port.error("GET", "/admin/config", 500)
        assert "object" not in error["message"]
        assert "GET /admin/config failed" in caplog.text


async def test_the_request_id_is_echoed_with_an_error() -> None:
    async with admin_port() as port, port.client.get("/nothing", headers={"x-request-id": "abc"}) as response:
        assert response.headers["x-request-id"] == "abc"


async def test_a_page_of_another_site_may_not_change_anything() -> None:
    async with admin_port() as port:
        port.add("pod-0")
        foreign = {"origin": "https://elsewhere.example"}
        fields = await port.error("POST", "/admin/pods/pod-0/drain", 403, headers=foreign)
        assert fields["type"] == "permission_error"
        assert [endpoint.name for endpoint in port.fleet.ready] == ["pod-0"]


async def test_a_page_of_the_admin_port_itself_may() -> None:
    async with admin_port() as port:
        port.add("pod-0")
        own = {"origin": f"http://127.0.0.1:{port.client.port}", "host": f"127.0.0.1:{port.client.port}"}
        await port.json("POST", "/admin/pods/pod-0/drain", headers=own)
        assert list(port.fleet.ready) == []


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"content-length: 9\r\n\r\nlistn", 408, "did not arrive within 0.05 s"),
        (b"content-length: 5\r\ncontent-encoding: gzip\r\n\r\nhello", 400, "malformed"),
    ],
    ids=["slow", "not gzip"],
)
async def test_a_missing_or_malformed_body_is_the_clients_fault(
    sent: bytes, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with admin_port(body_timeout=0.05) as port:
        reader, writer = await asyncio.open_connection(port.client.host, port.client.port)
        writer.write(b"POST /admin/config HTTP/1.1\r\nhost: localhost\r\n" + sent)
        assert await reader.readline() == b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode())
        await reader.readuntil(b"\r\n\r\n")
        assert message in (await reader.readuntil(b"}}")).decode()
        writer.close()
    assert "proxy.http.admin" not in {record.name for record in caplog.records}


async def test_a_client_that_leaves_before_the_end_of_its_body_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with admin_port() as port:
        _, writer = await asyncio.open_connection(port.client.host, port.client.port)
        writer.write(b"POST /admin/config HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nlistn")
        await writer.drain()
        await port.json("GET", "/admin/pods")
        writer.close()
        await until(lambda: "POST /admin/config" in caplog.text)
    assert "Traceback" not in caplog.text
