"""A real Prometheus reads a real proxy, and queries of the front dashboard have results."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import Stack, stack
from tests.system.telemetry.test_rules import DASHBOARDS, RULES

PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed; in Debian: apt-get install prometheus"
)

OF_TROUBLE = {"Errors by status", "Refusals by reason", "Failed attempts", "Scorer faults and shadows"}
"""Panels that are empty as long as all is well."""

PATIENCE = 60.0
"""Seconds for a Prometheus that scrapes once a second and needs several scrapes."""

Queries = dict[str, list[str]]
"""By the title of the panel."""


@pytest.mark.smoke
async def test_queries_of_dashboards_have_results_and_no_alert_fires(tmp_path: Path) -> None:
    boards = {path.stem: queries(path) for path in DASHBOARDS}
    async with stack(2) as s, prometheus(s, tmp_path) as server:
        async with asyncio.timeout(PATIENCE):
            while wanting := await without_result(server, boards["kvlane"]) - OF_TROUBLE:
                await asyncio.gather(*(s.chat(f"question {number}", max_tokens=8) for number in range(4)))
                await asyncio.sleep(0.5)
        assert not wanting
        for count in boards.values():
            await without_result(server, count)
        groups = (await server.get("/api/v1/rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert rules
        assert [rule["lastError"] for rule in rules if rule.get("lastError")] == []
        assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


class Server:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def get(self, path: str, **query: str) -> Any:
        """Fail with the error of Prometheus for a wrong query."""
        async with self._session.get(self._url + path, params=query) as reply:
            content = await reply.json(content_type=None)
            assert content["status"] == "success", f"{query}: {content}"
            return content["data"]


@asynccontextmanager
async def prometheus(s: Stack, folder: Path) -> AsyncIterator[Server]:
    port = free_port()
    job = {"job_name": "kvlane", "static_configs": [{"targets": [s.admin.removeprefix("http://")]}]}
    settings = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [job]}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump({**settings, "rule_files": list(map(str, RULES))}))
    listens = f"--web.listen-address=127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        *(PROMETHEUS or "", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", listens),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        await _ready(s.http, f"http://127.0.0.1:{port}/-/ready")
        yield Server(s.http, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        await process.wait()


async def _ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with session.get(url) as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


def queries(path: Path) -> Queries:
    """Fill in variables as Grafana does: all values, and a window with several scrapes."""
    found: Queries = {}
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "30s")
            found.setdefault(panel["title"], []).append(re.sub(r"\$\{?\w+(:\w+)?\}?", ".*", text))
    return found


async def without_result(server: Server, count: Queries) -> set[str]:
    """Return the titles of panels with a query without a result."""
    return {
        title
        for title, texts in count.items()
        for text in texts
        if not (await server.get("/api/v1/query", query=text))["result"]
    }
