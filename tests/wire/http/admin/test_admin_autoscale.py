"""/autoscale on the admin port."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.core.endpoint import EndpointState
from proxy.fleet.settings import DataParallelSettings, PodSettings
from tests.helpers.autoscale.scaled import Rig
from tests.helpers.http.admin.fakes import admin_port

POOL = "/autoscale/pools/default"


async def test_the_latest_decision_is_shown_with_its_number() -> None:
    rig = Rig(decode=2)
    async with admin_port(scaled={"default": rig.pool}) as port:
        await port.json("GET", POOL, 503)
        await rig.step()
        async with port.client.get(POOL) as response:
            assert (response.headers["etag"], response.headers["cache-control"]) == ('"1"', "no-store")
            found = await response.json()
        assert found["valid"] is True
        assert found["roles"]["decode"]["desired"] == 2
        assert (found["leads"], found["paused"], found["outcomes"]) == (True, False, {})
        async with port.client.get(POOL, headers={"if-none-match": '"1"'}) as response:
            assert response.status == 304
        assert await port.json("GET", "/autoscale/pools") == {"pools": ["default"]}


async def test_a_held_decision_is_no_error() -> None:
    """KEDA takes an error for a failure, and the last values are good."""
    rig = Rig(prefill=0)
    await rig.step()
    async with admin_port(scaled={"default": rig.pool}) as port:
        assert (await port.json("GET", POOL))["valid"] is False


async def test_the_history_has_the_latest_decisions() -> None:
    rig = Rig()
    for _ in range(3):
        await rig.step()
    async with admin_port(scaled={"default": rig.pool}) as port:
        found = await port.json("GET", f"{POOL}/history?n=2")
        assert [one["decision_id"] for one in found["decisions"]] == [2, 3]
        await port.error("GET", f"{POOL}/history?n=-1", 400)


async def test_an_operator_pauses_resumes_and_overrides() -> None:
    rig = Rig()
    async with admin_port(scaled={"default": rig.pool}) as port:
        assert await port.json("POST", f"{POOL}/pause") == {"paused": True}
        assert await port.json("POST", f"{POOL}/resume") == {"paused": False}
        body = {"roles": {"decode": 8}, "ttl": "30m"}
        assert (await port.json("POST", f"{POOL}/override", json=body))["overrides"] == {"decode": 8}
        assert (await rig.step()).desired["decode"] == 8


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        {"roles": {"decode": 8}},
        {"roles": {"decode": "8"}, "ttl": "1m"},
        {"roles": {"decode": 800}, "ttl": "1m"},
        {"roles": {"decod": 8}, "ttl": "1m"},
        {"roles": {"decode": 8}, "ttl": "1y"},
        {"roles": {"decode": 8}, "ttl": "9999h"},
    ],
)
async def test_an_invalid_override_changes_nothing(body: object) -> None:
    rig = Rig()
    async with admin_port(scaled={"default": rig.pool}) as port:
        await port.error("POST", f"{POOL}/override", 400, json=body)
        assert rig.pool.loop.overrides() == {}


async def test_an_external_scaler_acknowledges() -> None:
    rig = Rig()
    await rig.step()
    async with admin_port(scaled={"default": rig.pool}) as port:
        body = {"decision_id": 1, "roles": {"decode": 2}}
        assert (await port.json("POST", f"{POOL}/ack", json=body))["acknowledged"]["roles"] == {"decode": 2}
        assert (await rig.step()).situations["decode"].current == 2
        await port.error("POST", f"{POOL}/ack", 400, json={**body, "decision_id": 99})
        await port.error("POST", f"{POOL}/ack", 400, json={**body, "decision_id": True})


async def test_a_pool_without_a_policy_is_not_found() -> None:
    async with admin_port(scaled={"default": Rig().pool}) as port:
        assert "did you mean 'default'?" in (await port.error("GET", "/autoscale/pools/defualt", 404))["message"]


async def test_every_path_needs_the_key() -> None:
    async with admin_port("sesame", scaled={"default": Rig().pool}) as port:
        await port.error("GET", POOL, 401)
        await port.error("POST", f"{POOL}/pause", 401)
        await port.error("GET", "/autoscale/drain/a", 401)


async def test_a_stopping_pod_waits_for_its_last_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with admin_port() as port:
        pod = port.add("a")
        pod.charge(1, 0)
        assert (await port.json("GET", "/autoscale/drain/a?wait=100ms", 202))["state"] == "draining"
        waiting = asyncio.ensure_future(port.json("GET", "/autoscale/drain/a?wait=30s"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        pod.charge(-1, 0)
        assert (await waiting)["load"]["requests"] == 0
        assert "drain of pod a by 'anybody'" in caplog.text


async def test_a_pod_with_ranks_waits_for_the_last_request_on_any_of_them() -> None:
    async with admin_port() as port:
        pod = port.fleet.add(PodSettings("http://moe:8000", "moe", data_parallel=DataParallelSettings(2)))
        pod.ranks[1].charge(1, 0)
        assert (await port.json("GET", "/autoscale/drain/moe", 202))["load"]["requests"] == 1
        waiting = asyncio.ensure_future(port.json("GET", "/autoscale/drain/moe?wait=30s"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        pod.ranks[1].charge(-1, 0)
        assert (await waiting)["load"]["requests"] == 0


async def test_a_page_of_another_site_cannot_drain() -> None:
    async with admin_port() as port:
        pod = port.add("a")
        await port.error("GET", "/autoscale/drain/a", 403, headers={"sec-fetch-site": "cross-site"})
        assert pod.state is EndpointState.READY
