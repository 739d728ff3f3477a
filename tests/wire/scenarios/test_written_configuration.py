"""The configuration that the admin port shows as written can be applied again."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
import yaml

from proxy.app import App
from proxy.config.load import load
from proxy.config.reload import changed
from proxy.settings import from_mapping
from tests.helpers.docs.pages import ROOT

VARIABLES = """
listen: {host: "${HOST:-127.0.0.1}", port: "${PORT:-0}"}
admin: {port: "${ADMIN:-0}"}
pods:
  static:
    - {url: http://127.0.0.1:9, weight: "${WEIGHT:-0.5}", labels: {zone: "${ZONE:-007}", rack: "${RACK:-12}"}}
telemetry: {accessLog: "${LOG:-false}"}
"""


async def proposed(path: Path) -> dict[str, object]:
    async with App(load(path, {})) as app, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{app.admin_port}/admin/config"
        async with session.get(f"{url}/source") as response:
            written = await response.text()
        async with session.post(f"{url}?dry_run=1", data=written) as response:
            body: dict[str, object] = await response.json()
            assert response.status == 200, body
            return {"changed": body["changed"], "written": yaml.safe_load(written)}


async def test_variables_keep_the_type_of_their_text(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(VARIABLES)
    found = await proposed(file)
    assert found["changed"] == []
    (pod,) = yaml.safe_load(yaml.safe_dump(found["written"]))["pods"]["static"]
    assert pod["weight"] == 0.5
    assert pod["labels"] == {"zone": "007", "rack": 12}


@pytest.mark.parametrize("name", ["prefix-aware", "latency", "explain", "disaggregated"])
def test_the_examples_can_be_posted_again(name: str) -> None:
    settings = load(ROOT / "config" / f"{name}.yaml", {})
    assert changed(settings, from_mapping(App(settings).configurations.written())) == []
