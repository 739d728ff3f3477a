"""TLS on both sides: which certificates are shown and required, and what happens when their files change."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from aiohttp import ClientSession, web

from proxy.core.endpoint import Endpoint, PodTls, update
from proxy.core.ports import SystemClock
from proxy.http.admin import AdminServer
from proxy.http.guards import CloseReason
from proxy.http.settings import AdminSettings, PodTlsContexts, ReloadedContext, ServerTls
from proxy.http.upstream.pool import PooledFetcher
from tests.helpers.http.authority import Authority, client_context, server_context
from tests.helpers.http.support import (
    SSE_HEAD,
    STREAMED,
    Client,
    Pod,
    Received,
    Rig,
    answering,
    event,
    plain,
    post,
    rig,
)
from tests.helpers.waiting import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "one")


@asynccontextmanager
async def secured(port: Rig, context: ssl.SSLContext) -> AsyncIterator[Client]:
    number = port.server.port
    reader, writer = await asyncio.open_connection("127.0.0.1", number, ssl=context, limit=2**26)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def status(port: Rig, context: ssl.SSLContext, request: bytes | None = None) -> int:
    async with secured(port, context) as client:
        client.send(request or post())
        return (await client.until_closed()).status


def serial(client: Client) -> object:
    shown: ssl.SSLObject = client.writer.get_extra_info("ssl_object")
    return (shown.getpeercert() or {})["serialNumber"]


# towards clients


async def test_requests_and_streams_pass_over_tls(authority: Authority) -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, event("1"), event("x" * 300_000), b"0\r\n\r\n")

    tls = ServerTls(str(authority.issue("kvlane")))
    async with Pod(script) as pod, rig(pod, tls=tls) as port, secured(port, client_context(authority.file)) as client:
        for size in (10, 700_000):
            client.send(post(body=STREAMED[:-1] + b" " * size + b"}", close=False))
            raw = await client.until(b"0\r\n\r\n")
            assert raw.count(b"data: ") == 2
            assert pod.requests[-1].all(b"content-length") == [str(len(STREAMED) + size).encode()]


async def test_a_refusal_reaches_a_client_over_tls(authority: Authority) -> None:
    tls = ServerTls(str(authority.issue("kvlane")))
    async with rig(tls=tls) as port, secured(port, client_context(authority.file)) as client:
        client.send(b"NONSENSE\r\n\r\n" + b"x" * 100_000)
        assert b" 400 " in await client.response()


async def test_a_client_without_tls_is_disconnected(authority: Authority) -> None:
    async with rig(tls=ServerTls(str(authority.issue("kvlane")))) as port:
        seen = await port.ask(post())
        assert seen.status == 0
        assert port.ended == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_failed_handshakes_are_counted_and_leave_nothing_behind(authority: Authority, loop: str) -> None:
    """On the loop of production without a garbage collection."""
    context = client_context(authority.file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def counted(port: Rig) -> int:
        if loop == "asyncio":
            gc.collect()
        assert set(port.hung_up) <= {CloseReason.TLS_HANDSHAKE}
        return port.hung_up[CloseReason.TLS_HANDSHAKE]

    async def failed() -> None:
        tls = ServerTls(str(authority.issue("kvlane")), min_version="1.3")
        async with Pod(answering(plain())) as pod, rig(pod, tls=tls) as port:
            async with port.client() as silent:
                assert await status(port, client_context(authority.file)) == 200
                assert (await port.ask(b"NONSENSE\r\n\r\n")).status == 0
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await status(port, context)
                await until(lambda: counted(port) == 2)
                silent.leave()
            await until(lambda: counted(port) == 3)
            assert port.ended[0].status == 200
            assert len(port.ended) == 1

    gc.disable()
    try:
        (uvloop.run if loop == "uvloop" else asyncio.run)(failed())
    finally:
        gc.enable()


async def test_an_old_version_is_refused(authority: Authority) -> None:
    context = client_context(authority.file)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    own = str(authority.issue("kvlane"))
    async with Pod(answering(plain())) as pod, rig(pod, tls=ServerTls(own)) as port:
        assert await status(port, context) == 200
    async with rig(tls=ServerTls(own, min_version="1.3")) as port:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await status(port, context)


async def test_a_client_certificate_is_required_if_configured(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "two")
    tls = ServerTls(str(authority.issue("kvlane")), client_ca=str(authority.file))
    async with Pod(answering(plain())) as pod, rig(pod, tls=tls) as port:
        assert await status(port, client_context(authority.file, authority.issue("client"))) == 200
        for shown in (None, other.issue("client")):
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
                assert await status(port, client_context(authority.file, shown)) == 200
        assert len(pod.requests) == 1


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_changed_certificate_is_used_for_new_clients_and_closes_no_connection(
    authority: Authority, loop: str
) -> None:
    async def changed() -> None:
        tls, context = ServerTls(str(authority.issue("kvlane"))), client_context(authority.file)
        async with Pod(answering(plain(b"good"))) as pod, rig(pod, tls=tls) as port, secured(port, context) as before:
            authority.issue("kvlane")
            before.send(post(close=False))
            assert (await before.response()).endswith(b"good")
            async with secured(port, context) as after:
                assert serial(before) != serial(after)
                after.send(post(close=False))
                assert (await after.response()).endswith(b"good")

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(changed())


async def test_clients_of_a_removed_authority_are_refused(authority: Authority, tmp_path: Path) -> None:
    other, trusted = Authority(tmp_path / "two"), tmp_path / "trusted.pem"
    old, new = authority.issue("old"), other.issue("new")
    trusted.write_text(authority.file.read_text())
    tls = ServerTls(str(authority.issue("kvlane")), client_ca=str(trusted))
    async with Pod(answering(plain())) as pod, rig(pod, tls=tls) as port:
        context = client_context(authority.file, old)
        assert await status(port, context) == 200
        trusted.write_text(other.file.read_text() + "\n")
        assert await status(port, client_context(authority.file, new)) == 200
        with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
            assert await status(port, context) == 200


async def test_unusable_files_keep_the_current_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    own, context = authority.issue("kvlane"), client_context(authority.file)
    good = own.read_text()
    async with Pod(answering(plain())) as pod, rig(pod, tls=ServerTls(str(own))) as port:
        own.write_text(good[: len(good) // 2])
        for _ in range(2):
            assert await status(port, context) == 200
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        own.unlink()
        assert await status(port, context) == 200
        authority.issue("kvlane")
        async with secured(port, context) as client:
            assert serial(client)


async def test_an_unusable_certificate_at_start_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nowhere\.pem"):
        async with rig(tls=ServerTls(str(tmp_path / "nowhere.pem"))):
            pass


async def test_the_admin_port_speaks_tls(authority: Authority) -> None:
    admin = AdminSettings("127.0.0.1", 0, tls=ServerTls(str(authority.issue("admin")), client_ca=str(authority.file)))
    context = client_context(authority.file, authority.issue("operator"))
    async with AdminServer(admin, web.Application()) as server, ClientSession() as session:
        url = f"https://127.0.0.1:{server.port}/"
        async with session.get(url, ssl=context) as response:
            assert response.status == 404


# towards pods


async def status_of(pod: Pod, tls: PodTls | None = None, default: PodTls | None = None) -> int:
    """Over a relay and over a scrape: both the same."""
    update(pod.endpoint, tls=tls)
    pod_tls = PodTlsContexts(default, lambda: [pod.endpoint])
    async with rig(pod, pod_tls=pod_tls) as port, PooledFetcher(5.0, SystemClock(), pod_tls) as fetcher:
        seen = await port.ask(post())
        try:
            scraped, _ = await fetcher.get(pod.endpoint.url + "/metrics", None)
        except Exception:  # noqa: BLE001  # any error: no response
            scraped = 502
    assert scraped == seen.status
    return seen.status


async def test_a_pod_with_a_trusted_certificate_is_reached(authority: Authority, tmp_path: Path) -> None:
    ca, other = PodTls(ca=str(authority.file)), PodTls(ca=str(Authority(tmp_path / "two").file))
    async with Pod(answering(plain()), server_context(authority.issue("pod"))) as pod:
        assert await status_of(pod) == 502
        assert await status_of(pod, other, ca) == 502
        assert await status_of(pod, ca, other) == 200
        assert await status_of(pod, None, ca) == 200


async def test_a_pods_certificate_must_have_its_name(authority: Authority) -> None:
    async with Pod(answering(plain()), server_context(authority.issue("pod", "DNS:pod.internal"))) as pod:
        assert await status_of(pod, PodTls(ca=str(authority.file))) == 502
        assert await status_of(pod, PodTls(ca=str(authority.file), server_name="pod.internal")) == 200


async def test_any_certificate_is_accepted_if_configured(authority: Authority) -> None:
    async with Pod(answering(plain()), server_context(authority.issue("pod", "DNS:other"))) as pod:
        assert await status_of(pod, PodTls(insecure_skip_verify=True)) == 200


async def test_a_pod_gets_the_client_certificate(authority: Authority) -> None:
    own = str(authority.issue("kvlane"))
    async with Pod(answering(plain()), server_context(authority.issue("pod"), authority.file)) as pod:
        assert await status_of(pod, PodTls(ca=str(authority.file))) == 502
        assert await status_of(pod, PodTls(ca=str(authority.file), cert=own)) == 200


async def test_a_changed_file_changes_the_trusted_authorities(authority: Authority, tmp_path: Path) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(Authority(tmp_path / "two").file.read_text())
    async with Pod(answering(plain()), server_context(authority.issue("pod"))) as pod:
        pod_tls = PodTlsContexts(PodTls(ca=str(trusted)))
        async with rig(pod, pod_tls=pod_tls) as port:
            assert (await port.ask(post())).status == 502
            trusted.write_text(authority.file.read_text() + "\n")
            assert (await port.ask(post())).status == 200


async def test_missing_files_are_a_failure_of_their_pod_only(authority: Authority) -> None:
    async with Pod(answering(plain()), server_context(authority.issue("pod"))) as pod:
        assert await status_of(pod, PodTls(ca="/nowhere.pem")) == 502


def test_the_metrics_of_a_pod_on_another_port_have_the_same_trust(authority: Authority) -> None:
    mine = PodTls(server_name="mine")
    pods = [Endpoint("a", "https://a:1", tls=PodTls(server_name="other")), Endpoint("b", "https://b", tls=mine)]
    pod_tls = PodTlsContexts(PodTls(server_name="all"), lambda: pods)
    assert [pod_tls.at(host, port)[1] for host, port in (("b", 443), ("b", 9000), ("a", 1), ("c", 443))] == [
        "mine",
        "mine",
        "other",
        "all",
    ]


def test_a_pool_can_configure_the_trust_of_its_pods(authority: Authority) -> None:
    pods = [Endpoint("a", "https://a"), Endpoint("b", "https://b", pool="large")]
    pods.append(Endpoint("c", "https://c", pool="large", tls=PodTls(server_name="mine")))
    pod_tls = PodTlsContexts(PodTls(server_name="all"), lambda: pods, {"large": PodTls(server_name="large")})
    assert [pod_tls.of(pod)[1] for pod in pods] == ["all", "large", "mine"]
    assert [pod_tls.at(name, 443)[1] for name in "abc"] == ["all", "large", "mine"]
    pod_tls.default, pod_tls.pools = PodTls(), {}
    assert pod_tls.of(pods[1])[1] is None


def test_contradictory_settings_are_refused() -> None:
    for wrong in ({"key": "k"}, {"ca": "c", "insecure_skip_verify": True}):
        with pytest.raises(ValueError):
            PodTls(**wrong)


def test_unreadable_files_are_read_after_their_mode_is_corrected(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("first")

    def make() -> ssl.SSLContext:
        if not file.stat().st_mode & 0o044:
            raise PermissionError("cannot be read")
        return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    followed = ReloadedContext([str(file)], make)
    first = followed.context()
    new = tmp_path / "new.pem"
    new.write_text("second")
    new.chmod(0o600)
    new.replace(file)
    assert followed.context() is first
    file.chmod(0o644)
    assert followed.context() is not first
