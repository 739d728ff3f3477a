"""The actuator that POSTs, against a server."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestServer

from proxy.autoscale.actuators import Webhook
from proxy.autoscale.loop import ScalingOutcome
from tests.helpers.autoscale.orders import order


class Hook:
    def __init__(self) -> None:
        self.status = 204
        self.seen: list[tuple[dict[str, str], bytes]] = []

    async def receive(self, request: web.Request) -> web.Response:
        self.seen.append((dict(request.headers), await request.read()))
        return web.Response(status=self.status, headers={"location": "/elsewhere"})


@pytest.fixture
async def hook() -> AsyncIterator[tuple[Hook, str]]:
    hook, app = Hook(), web.Application()
    app.router.add_post("/scale", hook.receive)
    async with TestServer(app) as server:
        yield hook, str(server.make_url("/scale"))


async def test_the_body_is_signed(hook: tuple[Hook, str]) -> None:
    server, url = hook
    webhook = Webhook(url, "key", 5.0, lambda: 123.0)
    assert await webhook.scale(order(5)) is ScalingOutcome.OK
    assert await webhook.scale(order(5)) is ScalingOutcome.OK
    (headers, body), (again, _) = server.seen
    expected = hmac.new(b"key", body, hashlib.sha256).hexdigest()
    assert {name.lower(): value for name, value in headers.items()}["x-signature"] == f"sha256={expected}"
    result = json.loads(body)
    assert (result["sent_at"], result["order"]["desired"], result["pool"]) == (123.0, 5, "default")
    assert headers["idempotency-key"] == again["idempotency-key"] == "default/decode/7/5"


async def test_without_a_key_there_is_no_signature(hook: tuple[Hook, str]) -> None:
    server, url = hook
    await Webhook(url, None, 5.0, lambda: 0.0).scale(order(5))
    assert "x-signature" not in {name.lower() for name in server.seen[0][0]}


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, ScalingOutcome.OK),
        (409, ScalingOutcome.BUSY),
        (403, ScalingOutcome.REFUSED),
        (500, ScalingOutcome.ERROR),
        (302, ScalingOutcome.ERROR),
    ],
)
async def test_the_status_gives_the_result(hook: tuple[Hook, str], status: int, outcome: ScalingOutcome) -> None:
    server, url = hook
    server.status = status
    assert await Webhook(url, None, 5.0, lambda: 0.0).scale(order(5)) is outcome


async def test_a_closed_port_is_an_error() -> None:
    with pytest.raises(ClientError):
        await Webhook("http://127.0.0.1:1/scale", None, 5.0, lambda: 0.0).scale(order(5))
