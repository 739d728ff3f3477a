"""A third-party plugin package: built, installed, discovered, and deciding."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from proxy.core.endpoint import Endpoint, update
from proxy.core.errors import ConfigError
from proxy.core.ports import Clock, ManualClock, Random
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest, Prompt
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read

PACKAGE = Path(__file__).parents[2] / "packages" / "kvlane-greenest"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package installed, as an installer would: its wheel, unpacked."""
    pytest.importorskip("hatchling", reason="builds the package; it is in the group dev")
    root = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(PACKAGE, root / "source")
    build_command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(root / "dist")]
    subprocess.run(build_command, cwd=source, check=True, capture_output=True)
    (wheel,) = (root / "dist").glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(root / "site")
    return root / "site"


@pytest.fixture
def registry(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.syspath_prepend(str(site))
    yield Registry.discover()
    for name in [name for name in sys.modules if name.startswith("kvlane_greenest")]:
        del sys.modules[name]


def scheduling(registry: Registry, *plugins: dict[str, Any]) -> Scheduling:
    return build(read({"plugins": plugins}), registry, {Clock: ManualClock(), Random: random.Random(0)})


def request() -> InferenceRequest:
    return InferenceRequest("id", "/v1/completions", "model")


def pods() -> list[Endpoint]:
    return [Endpoint("coal", labels={"region": "x"}), Endpoint("wind", labels={"region": "north"}), Endpoint("none")]


def test_an_installed_package_is_found_by_its_entry_points(registry: Registry) -> None:
    found = {cls.plugin_type for cls in registry}
    assert {"greenest-region-scorer", "green-forecast-producer", "green-forecast-scorer", "queue-scorer"} <= found


def test_without_the_package_its_types_are_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown plugin type 'greenest-region-scorer'"):
        scheduling(Registry.discover(), {"type": "greenest-region-scorer"})


def test_its_scorer_decides_and_its_parameters_are_strict(registry: Registry) -> None:
    share = {"renewableShare": {"north": 0.9, "x": 0.1}}
    built = scheduling(registry, {"type": "greenest-region-scorer", "parameters": share})
    assert built.scheduler.schedule(request(), pods()).target.name == "wind"
    with pytest.raises(ConfigError, match="unknown field 'regionLabl'; did you mean 'regionLabel'"):
        scheduling(registry, {"type": "greenest-region-scorer", "parameters": {"regionLabl": "r"}})


def test_its_decider_chooses_who_computes_a_prompt(registry: Registry) -> None:
    decider = {"type": "greener-prefill-decider", "parameters": {"renewableShare": {"north": 0.9, "x": 0.1}}}
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider["type"]}}}
    plugins = [decider, handler, {"type": "decode-filter"}, {"type": "prefill-filter"}]
    stages = [{"name": name, "plugins": [{"pluginRef": f"{name}-filter"}]} for name in ("decode", "prefill")]
    ports = {Clock: ManualClock(), Random: random.Random(0)}
    scheduler = build(read({"plugins": plugins, "schedulingProfiles": stages}), registry, ports).scheduler
    coal, wind, _ = pods()
    for decodes, computes, tokens in ((coal, wind, 1000), (wind, coal, 1000), (coal, wind, 999)):
        update(decodes, role="decode")
        update(computes, role="prefill")
        incoming = InferenceRequest("id", "/v1/completions", "model", Prompt((bytes(4 * tokens),)))
        decision = scheduler.schedule(incoming, [coal, wind])
        assert decision.target is decodes
        assert decision.prefill == ((wind,) if decodes is coal and tokens == 1000 else ())


def test_a_fresh_interpreter_lists_it(site: Path) -> None:
    code = "from proxy.core.registry import Registry; print(*(c.plugin_type for c in Registry.discover()))"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); {code}"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert "green-forecast-scorer" in listed


class TestAScorerWithAnExternalService:
    @staticmethod
    def built(registry: Registry, server: asyncio.Server) -> Scheduling:
        port = server.sockets[0].getsockname()[1]
        producer = {"type": "green-forecast-producer", "parameters": {"port": port}}
        return scheduling(registry, producer, {"type": "green-forecast-scorer"})

    async def test_its_service_gets_one_query_for_all_pods(self, registry: Registry) -> None:
        queries = []

        async def forecast(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            queries.append(json.loads(await reader.readline()))
            writer.write(b'{"wind": 0.9, "coal": 0.2}\n')
            writer.close()

        async with await asyncio.start_server(forecast, "127.0.0.1", 0) as server:
            built, mine = self.built(registry, server), request()
            (producer,) = built.producers
            await producer.produce(mine, pods())
        assert queries == [["coal", "wind", "none"]]
        assert [one.name for one in built.scheduler.schedule(mine, pods()).candidates()] == ["wind", "coal", "none"]

    async def test_a_hanging_service_leaves_the_datum_missing_and_the_decision_is_made(
        self, registry: Registry
    ) -> None:
        hanging = asyncio.Event()

        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await hanging.wait()
            writer.close()

        async with await asyncio.start_server(never, "127.0.0.1", 0) as server:
            built, mine = self.built(registry, server), request()
            (producer,) = built.producers
            assert producer.waits
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await producer.produce(mine, pods())
            hanging.set()
        decision = built.scheduler.schedule(mine, pods())
        assert len(list(decision.candidates())) == 3
        assert built.instances["green-forecast-scorer"].score(None, mine, pods()) == [0.0, 0.0, 0.0]  # type: ignore[attr-defined]
