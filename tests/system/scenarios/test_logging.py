"""How much is logged, changed at the admin port."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator

import aiohttp
import pytest

from proxy.cluster.supervisor import Supervisor
from proxy.lab.sim import SimConfig, SimFleet
from tests.helpers.cluster.host import configured, host
from tests.helpers.scenarios.stack import stack
from tests.helpers.waiting import PATIENCE, until

PACKAGE = "proxy.reliability.health"


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    before = {logger: logger.level for logger in (logging.getLogger(PACKAGE), logging.getLogger())}
    yield
    for logger, level in before.items():
        logger.setLevel(level)


async def test_a_log_level_is_changed_shown_and_reset() -> None:
    async with stack(1) as s:
        response, body = await s.operate("POST", "/admin/logging", {PACKAGE: "debug"})
        assert (response.status, body["levels"][PACKAGE]) == (200, "debug")
        assert logging.getLogger(PACKAGE).isEnabledFor(logging.DEBUG)
        response, body = await s.operate("POST", "/admin/logging", {PACKAGE: None})
        _, shown = await s.operate("GET", "/admin/logging")
        assert shown == body
        assert PACKAGE not in shown["levels"]
        assert PACKAGE in shown["rooms"]
        response, body = await s.operate("POST", "/admin/logging", {PACKAGE: "loud"})
        assert (response.status, body["error"]["param"]) == (400, PACKAGE)


async def test_later_workers_get_the_log_levels(capfd: pytest.CaptureFixture[str]) -> None:
    wanted = {"proxy.telemetry.logs": "debug"}
    async with (
        SimFleet(1, SimConfig(time_scale=20)) as sim,
        Supervisor(configured(sim), 1) as supervisor,
        aiohttp.ClientSession(f"http://127.0.0.1:{supervisor.admin_port}") as admin,
    ):
        async with admin.post("/admin/logging", json=wanted) as response:
            assert response.status == 200
        await until_logged(capfd, "log levels set to")
        (first,) = supervisor.pids
        os.kill(first, signal.SIGKILL)
        await until(lambda: supervisor.pids not in ([], [first]))
        await until_logged(capfd, "log levels set to")


async def test_a_reload_changes_the_log_level_of_the_supervisor_too() -> None:
    async with host(1) as it:
        telemetry = {"accessLog": False, "logLevel": "info"}
        await it.admin("POST", "/admin/config", {**configured(it.sim).given, "telemetry": telemetry})
        assert (await it.admin("GET", "/admin/logging"))["levels"]["root"] == "info"


async def until_logged(capfd: pytest.CaptureFixture[str], text: str) -> str:
    """On standard error, since it was asked last."""
    output = ""
    async with asyncio.timeout(PATIENCE):
        while text not in output:
            output += capfd.readouterr().err
            await asyncio.sleep(0.05)
    return output
