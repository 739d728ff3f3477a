"""Keys, tokens and limits, through the whole proxy."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from proxy.auth import authenticator
from proxy.lab.sim import SimConfig
from tests.helpers.scenarios.stack import CHAT, ResponseAndBody, Stack, stack
from tests.helpers.waiting import PATIENCE, until

HELLO: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
KEYS = [{"name": "a", "key": "key-a", "tenant": "acme"}, {"name": "b", "key": "key-b", "tenant": "acme"}]


@asynccontextmanager
async def guarded(pods: int = 1, **security: Any) -> AsyncIterator[Stack]:
    async with stack(pods, settings={"security": {"apiKeys": KEYS, **security}}) as s:
        yield s


async def ask(s: Stack, key: str = "key-a", **fields: Any) -> ResponseAndBody:
    return await s.post(CHAT, {**HELLO, **fields}, {"authorization": f"Bearer {key}"})


async def stream(s: Stack, url: str, key: str = "key-a", **fields: Any) -> bytes:
    headers = {"authorization": f"Bearer {key}", "x-request-id": "same"}
    async with s.http.post(url + CHAT, json={**HELLO, "stream": True, **fields}, headers=headers) as response:
        assert response.status == 200
        return re.sub(rb'"created":\d+', b'"created":0', await response.read())


async def test_with_a_key_requests_are_served_and_without_one_refused() -> None:
    async with guarded() as s:
        response, body = await ask(s)
        assert response.status == 200
        assert body["choices"]
        response, body = await s.chat()
        assert response.status == 401
        assert body["error"]["code"] == "invalid_api_key"


async def test_the_official_client_understands_the_refusals() -> None:
    few = {"few": {"requestsPerMinute": 1}}
    async with guarded(limits=few, tenants={"acme": {"limits": "few"}}) as s:
        options: dict[str, Any] = {"base_url": s.url + "/v1", "max_retries": 0}
        async with openai.AsyncOpenAI(api_key="wrong", **options) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**HELLO)
        async with openai.AsyncOpenAI(api_key="key-a", **options) as client:
            await client.chat.completions.create(**HELLO)
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(**HELLO)
        assert int(refused.value.response.headers["retry-after"]) in range(50, 61)


async def test_a_restricted_key_sees_only_its_models() -> None:
    keys = [{"name": "some", "key": "some", "models": ["llama-*"]}, {"name": "all", "key": "all", "models": ["s*"]}]
    async with guarded(apiKeys=keys) as s:
        response, body = await ask(s, "some")
        assert (response.status, body["error"]["code"]) == (404, "model_not_found")
        assert (await ask(s, "all"))[0].status == 200
        for key, expected in (("some", []), ("all", ["sim"])):
            async with s.http.get(s.url + "/v1/models", headers={"x-api-key": key}) as models:
                assert [card["id"] for card in (await models.json())["data"]] == expected


async def test_a_key_reaches_no_forbidden_adapter_through_another_field() -> None:
    keys = [{"name": "a", "key": "some", "models": ["sim", "mine"]}, {"name": "b", "key": "all"}]
    async with guarded(apiKeys=keys) as s:
        for field in ({"lora_path": "other"}, {"lora_path": ["mine", "other"]}, {"lora_request": {"lora_path": "/x"}}):
            response, body = await ask(s, "some", **field)
            assert (response.status, body["error"]["code"]) == (404, "model_not_found")
            assert (await ask(s, "all", **field))[0].status == 200
        assert (await ask(s, "some", lora_path="mine"))[0].status == 200


async def test_the_404_of_a_pod_does_not_list_models_for_a_restricted_key() -> None:
    rarely = {"refresh": {"interval": "60s"}}
    keys = [{"name": "a", "key": "some", "models": ["sim"]}, {"name": "b", "key": "all"}]
    async with stack(1, settings={"security": {"apiKeys": keys}, "pods": rarely}) as s:
        s.pods[0].serve_models("secret")
        response, body = await ask(s, "all")
        assert (response.status, "secret" in body["error"]["message"]) == (404, True)
    async with stack(1, settings={"security": {"apiKeys": keys}, "pods": rarely}) as s:
        s.pods[0].serve_models("secret")
        response, body = await ask(s, "some")
        assert (response.status, body["error"]["code"]) == (404, "model_not_found")
        assert "secret" not in str(body)


async def test_a_websocket_to_a_pod_with_a_forbidden_model_is_refused() -> None:
    keys = [{"name": "a", "key": "some", "models": ["one"]}, {"name": "b", "key": "both", "models": ["one", "t*"]}]
    pods = [SimConfig(model="one"), SimConfig(model="two")]
    async with stack(2, pods, {"security": {"apiKeys": keys}}) as s:
        url, some = s.url + "/v1/realtime?model=one", {"authorization": "Bearer some"}
        async with s.http.ws_connect(url, headers=some) as socket:
            assert (await socket.receive_json())["model"] == "one"
        s.pods[0].serve_models("one", lora_adapters=["two"])
        await until(lambda: s.app.fleet.endpoints[0].models == frozenset(("one", "two")))
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await s.http.ws_connect(url, headers=some)
        assert caught.value.status == 403
        async with s.http.ws_connect(url, headers={"authorization": "Bearer both"}) as socket:
            assert (await socket.receive_json())["type"] == "session.created"


async def test_a_changed_key_file_applies_while_requests_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticator, "INTERVAL", 0.01)
    file = tmp_path / "keys.yaml"
    file.write_text("- {name: c, key: old}")
    async with guarded(apiKeysFile=str(file)) as s:
        assert (await ask(s, "old"))[0].status == 200
        new = tmp_path / "new.yaml"
        new.write_text("- {name: c, key: new}")
        os.replace(new, file)
        async with asyncio.timeout(PATIENCE):
            while (await ask(s, "new"))[0].status != 200:
                await asyncio.sleep(0.01)
        assert (await ask(s, "old"))[0].status == 401
        assert (await ask(s, "key-a"))[0].status == 200


async def test_requests_of_a_tenant_share_limits_and_responses_show_them() -> None:
    async with guarded(limits={"few": {"requestsPerMinute": 2}}, tenants={"acme": {"limits": "few"}}) as s:
        response, _ = await ask(s, "key-a")
        assert response.headers["x-ratelimit-remaining-requests"] == "1"
        await ask(s, "key-b")
        response, body = await ask(s, "key-a")
        assert response.status == 429
        assert response.headers["x-kvlane-reason"] == "rate-limited"
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        assert body["error"]["code"] == "rate_limit_exceeded"
        assert await s.sample('kvlane_limited_total{kind="tenant",name="acme",shadow="false"}') == 1.0


async def test_a_shadow_limit_refuses_nothing() -> None:
    limits = {"few": {"requestsPerMinute": 1, "shadow": True}}
    async with guarded(limits=limits, tenants={"acme": {"limits": "few"}}) as s:
        for _ in range(3):
            assert (await ask(s))[0].status == 200
        assert await s.sample('kvlane_limited_total{kind="tenant",name="acme",shadow="true"}') == 2.0


async def test_tokens_of_a_stream_are_counted_invisibly() -> None:
    """The first two requests take 150 tokens that were not reserved."""
    async with guarded(limits={"t": {"tokensPerDay": 150}}, tenants={"acme": {"limits": "t"}}) as s:
        long: dict[str, Any] = {"max_tokens": 80, "ignore_eos": True}
        assert await stream(s, s.url, **long) == await stream(s, s.pods[0].url, **long)
        await stream(s, s.url, "key-b", **long)
        response, body = await ask(s)
        assert response.status == 429
        assert "150 tokens per day" in body["error"]["message"]
        s.app.observer.flush()
        assert await s.sample('kvlane_tenant_completion_tokens_total{tenant="acme"}') == 160.0


async def test_concurrent_requests_are_limited() -> None:
    async with guarded(limits={"one": {"concurrentRequests": 1}}, tenants={"acme": {"limits": "one"}}) as s:
        headers = {"authorization": "Bearer key-a"}
        slow = {**HELLO, "stream": True, "max_tokens": 2000, "ignore_eos": True}
        async with s.http.post(s.url + CHAT, json=slow, headers=headers) as response:
            assert response.status == 200
            await response.content.readany()
            assert (await ask(s, "key-b"))[0].status == 429
        await s.idle()
        assert (await ask(s, "key-b"))[0].status == 200


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with guarded(limits={"one": {"concurrentRequests": 1}}, tenants={"acme": {"limits": "one"}}) as s:
        for _ in range(3):
            slow = {**HELLO, "stream": True, "max_tokens": 5000, "ignore_eos": True}
            response = await s.http.post(s.url + CHAT, json=slow, headers={"authorization": "Bearer key-a"})
            assert response.status == 200
            response.close()
            await s.idle()


async def test_requests_are_counted_by_tenant() -> None:
    async with guarded() as s:
        await ask(s, "key-a")
        await ask(s, "key-b")
        await ask(s, model="unknown")
        s.app.observer.flush()
        assert await s.sample('kvlane_tenant_requests_total{outcome="complete",tenant="acme"}') == 2.0
        assert await s.sample('kvlane_tenant_requests_total{outcome="refused",tenant="acme"}') == 1.0
        assert await s.sample('kvlane_tenant_completion_tokens_total{tenant="acme"}') == 16.0


async def test_with_keys_the_admin_port_needs_one_too() -> None:
    keys = [*KEYS, {"name": "ops", "key": "key-ops", "scopes": ["admin"]}]
    async with guarded(apiKeys=keys) as s:
        assert (await s.operate("GET", "/admin/pods"))[0].status == 401
        for key, expected in (("key-a", 403), ("key-ops", 200), ("nobody's", 401)):
            async with s.http.get(s.admin + "/admin/pods", headers={"authorization": f"Bearer {key}"}) as response:
                assert response.status == expected
        assert (await ask(s, "key-ops"))[0].status == 403


async def test_keys_are_not_shown() -> None:
    keys = [{"name": "ops", "key": "key-ops", "scopes": ["admin", "inference"], "limits": {"requestsPerMinute": 9}}]
    async with guarded(apiKeys=keys) as s:
        async with s.http.get(s.admin + "/admin/config", headers={"x-api-key": "key-ops"}) as response:
            assert response.status == 200
            shown = await response.text()
        assert "key-ops" not in shown
        assert "key-ops" not in repr(s.app.effective()["security"]["limits"])


async def test_no_key_and_no_prompt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with guarded(limits={"few": {"requestsPerMinute": 1}}, tenants={"acme": {"limits": "few"}}) as s:
            for key in ("key-a", "key-a", "key-wrong"):
                await s.post(CHAT, {**HELLO, "messages": [{"content": "secret prompt"}]}, {"x-api-key": key})
            await s.post(CHAT, {"model": "secret model", "messages": 1}, {"x-api-key": "key-b"})
            async with s.http.post(s.admin + "/admin/pods", headers={"x-api-key": "key-a"}) as response:
                assert response.status == 403
    assert "key-" not in caplog.text
    assert "secret" not in caplog.text
    assert "kvlane.audit" in caplog.text


async def test_a_token_of_an_issuer_is_accepted_and_a_new_key_fetched(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("jwt", reason="needs the extra: pip install 'kvlane[jwt]'")
    import time

    from tests.helpers.auth.issuer import AUDIENCE, NAME, Issuer, served

    issuer = Issuer(time.time())
    issuer.rotate("one")
    async with served(issuer) as url:
        jwt = {"jwks": url, "issuer": NAME, "audience": [AUDIENCE], "tenantClaim": "org", "limits": "few"}
        async with guarded(jwt=jwt, limits={"few": {"requestsPerMinute": 2}}) as s:
            assert (await ask(s, issuer.token("one", org="globex")))[0].status == 200
            issuer.rotate("two", "ES256", keep=True)
            assert (await ask(s, issuer.token("two", org="globex")))[0].status == 200
            assert (await ask(s, issuer.token("two", org="globex")))[0].status == 429
            assert (await ask(s, issuer.token("two", org="globex", sub="bob")))[0].status == 200
            assert (await ask(s, issuer.token("two", org="globex", aud="other")))[0].status == 401
            assert (await ask(s, "key-a"))[0].status == 200
            s.app.observer.flush()
            assert await s.sample('kvlane_tenant_requests_total{outcome="complete",tenant="globex"}') == 3.0
