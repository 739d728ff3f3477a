"""Keys of the admin port, and their log lines."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from proxy.auth.authenticator import Authenticator
from proxy.auth.settings import Scope
from proxy.core.errors import Forbidden, Unauthorized
from proxy.core.ports import Identity
from tests.helpers.http.admin.fakes import admin_port

OPS = {"authorization": "Bearer of-ops"}


class Admins(Authenticator):
    def __init__(self) -> None:
        pass

    async def authenticate(self, headers: Mapping[str, str], scope: Scope = "inference") -> Identity:
        assert scope == "admin"
        if headers.get("authorization") == OPS["authorization"]:
            return Identity("ops")
        if headers.get("authorization") == "Bearer of-a-client":
            raise Forbidden("no scope 'admin'")
        raise Unauthorized("who are you?")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (OPS, 200),
        ({"authorization": "Bearer sesame"}, 200),
        ({"authorization": "Bearer of-a-client"}, 403),
        ({"authorization": "Bearer wrong"}, 401),
        ({}, 401),
    ],
)
async def test_a_key_with_the_admin_scope_is_accepted(headers: dict[str, str], expected: int) -> None:
    async with admin_port("sesame", Admins()) as port:
        await port.json("GET", "/admin/pods", expected, headers=headers)


async def test_with_keys_for_clients_the_admin_port_needs_one() -> None:
    async with admin_port(None, Admins()) as port:
        await port.json("GET", "/admin/pods", 401)
        assert (await port.client.get("/metrics")).status == 200


@pytest.mark.parametrize(
    ("key", "headers", "who", "result"),
    [
        (None, {}, "anybody", "201"),
        ("sesame", {"authorization": "Bearer sesame"}, "admin.apiKey", "201"),
        ("sesame", {"authorization": "Bearer wrong"}, "a stranger", "401"),
        (None, {"origin": "https://elsewhere.example"}, "anybody", "403"),
    ],
)
async def test_every_attempted_change_is_logged(
    caplog: pytest.LogCaptureFixture, key: str | None, headers: dict[str, str], who: str, result: str
) -> None:
    async with admin_port(key) as port:
        with caplog.at_level(logging.INFO, "kvlane.audit"):
            await port.json("GET", "/admin/pods", 200 if result == "201" or key is None else 401, headers=headers)
            await port.json("POST", "/admin/pods", int(result), json={"url": "http://pod:1"}, headers=headers)
    assert [record.getMessage() for record in caplog.records if record.name == "kvlane.audit"] == [
        f"POST /admin/pods by '{who}' from 127.0.0.1: {result}"
    ]


async def test_the_key_is_logged_by_name_and_a_path_cannot_forge_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with admin_port(None, Admins()) as port:
        with caplog.at_level(logging.INFO, "kvlane.audit"):
            await port.json("DELETE", "/admin/pods/a%0ab", 404, headers=OPS)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvlane.audit"]
    assert line == "DELETE /admin/pods/a%0Ab by 'ops' from 127.0.0.1: 404"
    assert "of-ops" not in caplog.text
