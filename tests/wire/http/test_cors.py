"""Pages of other sites: CORS headers for browsers."""

from __future__ import annotations

import pytest

from proxy.core.attempt import Ending
from proxy.http.settings import CorsSettings, SecuritySettings
from tests.helpers.http.support import CHAT, Pod, Seen, answering, plain, post, rig

PAGE = "https://chat.example"
OTHER = "https://evil.example"


def allowing(*origins: str) -> SecuritySettings:
    return SecuritySettings(cors=CorsSettings(origins))


def question(origin: str, *fields: str) -> bytes:
    lines = "\r\n".join((f"origin: {origin}", "access-control-request-method: POST", *fields))
    return f"OPTIONS {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{lines}\r\n\r\n".encode()


def allowed(seen: Seen) -> list[str]:
    return seen.all("access-control-allow-origin")


OPEN_POD = plain(extra=b"access-control-allow-origin: *\r\nAccess-Control-Allow-Credentials: true\r\n")


async def test_by_default_no_page_may_read_a_response() -> None:
    async with Pod(answering(OPEN_POD)) as pod, rig(pod) as port:
        seen = await port.ask(post(CHAT, b"{}", f"origin: {PAGE}"))
        assert seen.status == 200
        assert not [name for name, _ in seen.headers if name.lower().startswith("access-control-")]
        assert (await port.ask(question(PAGE))).status == 405


async def test_an_allowed_page_gets_cors_headers_with_every_response() -> None:
    async with Pod(answering(OPEN_POD)) as pod, rig(pod, security=allowing(PAGE)) as port:
        for request in (post(CHAT, b"{}", f"origin: {PAGE}"), post("/nowhere", b"{}", f"origin: {PAGE}")):
            seen = await port.ask(request)
            assert (allowed(seen), seen.all("vary")) == ([PAGE], ["origin"])
            assert seen.all("access-control-allow-credentials") == []
        assert not [line for line in pod.requests[0].headers if line[0].startswith(b"access-control")]


async def test_other_pages_and_clients_get_none() -> None:
    async with Pod(answering(OPEN_POD)) as pod, rig(pod, security=allowing(PAGE)) as port:
        for fields in ((), (f"origin: {OTHER}",)):
            seen = await port.ask(post(CHAT, b"{}", *fields))
            assert (seen.status, allowed(seen)) == (200, [])
        assert allowed(await port.ask(question(OTHER))) == []


async def test_a_preflight_is_served_without_a_pod() -> None:
    async with rig(security=allowing(PAGE)) as port:
        seen = await port.ask(question(PAGE, "access-control-request-headers: authorization, content-type"))
        assert (seen.status, allowed(seen)) == (200, [PAGE])
        assert seen.all("access-control-allow-headers") == ["authorization, content-type"]
        methods = "GET, HEAD, POST, PUT, PATCH, DELETE"
        assert seen.all("access-control-allow-methods") == [methods]
        ended = await port.until_ended()
        assert (ended.status, ended.outcome) == (200, Ending.COMPLETE)
        assert port.gateway.calls == []


async def test_invalid_origins_are_not_repeated() -> None:
    async with rig(security=allowing(PAGE)) as port:
        seen = await port.ask(question(PAGE, "access-control-request-headers: a b"))
        assert seen.all("access-control-allow-headers") == []


async def test_a_wildcard_allows_every_page() -> None:
    async with Pod(answering(plain())) as pod, rig(pod, security=allowing("*")) as port:
        assert allowed(await port.ask(post(CHAT, b"{}", f"origin: {OTHER}"))) == ["*"]


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://*.example/x", "", "null"])
def test_an_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="origins"):
        CorsSettings((origin,))
