from __future__ import annotations

from typing import Any

import pytest

from proxy.http.admin_config import redacted
from tests.helpers.http.admin.fakes import admin_port


@pytest.mark.parametrize(
    ("shown", "config"),
    [
        ({"admin": {"port": 9190, "apiKey": "***"}}, {"admin": {"port": 9190, "apiKey": "s3"}}),
        ({"apiKey": None}, {"apiKey": None}),
        ({"apiKeys": ["***", "***"]}, {"apiKeys": ["s3", "s4"]}),
        ({"apiKeys": [{"name": "a", "key": "***"}]}, {"apiKeys": [{"name": "a", "key": "s3"}]}),
        ({"apiKeys": [{"scopes": ["admin"], "hash": "***"}]}, {"apiKeys": [{"scopes": ["admin"], "hash": "s3"}]}),
        ({"apiKey": {"value": "***", "origin": "file"}}, {"apiKey": {"value": "s3", "origin": "file"}}),
        ({"pods.static[0].apiKey": "***"}, {"pods.static[0].apiKey": "s3"}),
        ({"security.apiKeys[0].key": "***"}, {"security.apiKeys[0].key": "s3"}),
        ({"password": "***", "clientSecret": "***"}, {"password": "s3", "clientSecret": "s4"}),
        ({"maxTokens": 5, "url": "http://a"}, {"maxTokens": 5, "url": "http://a"}),
    ],
)
def test_secrets_are_hidden_everywhere(shown: Any, config: Any) -> None:
    assert redacted(config) == shown


async def test_the_configuration_is_shown_with_origins_and_without_secrets() -> None:
    async with admin_port() as port:
        port.config = {
            "admin": {"apiKey": {"value": "s3", "origin": "file"}, "port": {"value": 9190, "origin": "default"}}
        }
        assert await port.json("GET", "/admin/config") == {
            "version": {"number": 1},
            "admin": {"apiKey": {"value": "***", "origin": "file"}, "port": {"value": 9190, "origin": "default"}},
        }


async def test_faults_of_a_configuration_are_reported_one_by_one() -> None:
    async with admin_port() as port:
        response = await port.json("POST", "/admin/config", 400, data="none")
        assert response["error"]["code"] == "invalid_configuration"
        assert response["error"]["problems"] == [{"path": "listen.port", "message": "'none' is no port"}]


async def test_a_configuration_that_is_not_text_is_refused() -> None:
    async with admin_port() as port:
        assert (await port.error("POST", "/admin/config", 400, data=b"\xff\xfe"))["type"] == "invalid_request_error"


async def test_a_misspelt_query_applies_nothing() -> None:
    async with admin_port() as port:
        error = await port.error("POST", "/admin/config?dryrun=1", 400, data="none")
        assert "dryrun" in error["message"]


async def test_a_rollback_without_a_previous_configuration_is_a_conflict() -> None:
    async with admin_port() as port:
        assert (await port.error("POST", "/admin/config/rollback", 409))["code"] == "conflict"


async def test_without_a_key_nothing_changes() -> None:
    async with admin_port("s3") as port:
        for path in ("/admin/config", "/admin/config/rollback", "/admin/config?dry_run=1"):
            await port.error("POST", path, 401)
