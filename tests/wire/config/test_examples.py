"""The files in config/: they load, they build, they show every plugin, and they serve."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.app import App
from proxy.config.load import load
from proxy.core.registry import Registry
from proxy.lab.sim import SimConfig, SimFleet
from proxy.plugins import conformance
from tests.helpers.scenarios.stack import CHAT

CONFIG = Path(__file__).parents[3] / "config"
EXAMPLES = sorted(CONFIG.glob("*.yaml"))
KEY = "of-a-client"
ENVIRON = {"KVLANE_ADMIN_KEY": "secret", "CHAT_APP_KEY": KEY, "BATCH_KEY": "of-a-batch"} | {
    f"POD_{index}": f"http://127.0.0.1:810{index}" for index in range(4)
}

EXTRA = all(map(find_spec, ("zmq", "msgpack", "tokenizers", "jinja2")))
with_extra = pytest.mark.skipif(not EXTRA, reason="needs the extra: pip install 'kvlane[precise]'")

each_example = pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=with_extra) if "precise" in path.name else path for path in EXAMPLES],
    ids=lambda path: path.name,
)


@pytest.fixture(autouse=True, scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder of a model that an example may name."""
    if EXTRA:
        from tests.helpers.prefix.model import write

        ENVIRON["KVLANE_MODEL"] = str(write(tmp_path_factory.mktemp("model")))


@each_example
def test_an_example_loads_builds_and_has_origins(example: Path) -> None:
    effective = App(load(example, ENVIRON)).effective()
    for key in ("listen", "admin", "pods", "reliability", "security", "telemetry", "scheduling"):
        assert set(origins(effective[key])) <= {"file", "default", "injected"}
        assert list(origins(effective[key]))


def origins(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "origin" in value:
            yield value["origin"]
        for item in value.values():
            yield from origins(item)
    elif isinstance(value, list):
        for item in value:
            yield from origins(item)


@with_extra
def test_together_the_examples_use_every_plugin_that_is_not_for_tests_alone() -> None:
    used: set[str] = set()
    for example in EXAMPLES:
        scheduling = App(load(example, ENVIRON)).effective()["scheduling"]
        types = {plugin["name"]: plugin["type"] for plugin in scheduling["plugins"] if plugin["origin"] == "file"}
        referred = {use["pluginRef"] for profile in scheduling["schedulingProfiles"] for use in profile["plugins"]}
        used |= {kind for name, kind in types.items() if name in referred or not takes_part_in_profiles(kind)}
    assert used == {cls.plugin_type for cls in Registry.discover() if cls.__module__ != conformance.__name__}


def takes_part_in_profiles(kind: str) -> bool:
    return kind.endswith(("-filter", "-scorer", "-picker", "-aware"))


@each_example
def test_an_example_is_documented(example: Path) -> None:
    first, *_ = example.read_text().splitlines()
    assert first.startswith("# ")
    assert len(first) > 40


@each_example
async def test_an_example_serves(example: Path, tmp_path: Path) -> None:
    ranks = max((pod.ranks_declared or 1 for pod in load(example, ENVIRON).pods.static), default=1)
    config = SimConfig(model="base", lora_adapters=("poems",), time_scale=20, data_parallel_size=ranks)
    async with SimFleet(4, config) as sim:
        file = tmp_path / "pods.yaml"
        file.write_text(f"- {{url: {sim.urls[1]}, name: from-file}}")
        environ = ENVIRON | {f"POD_{index}": url for index, url in enumerate(sim.urls)}
        environ |= {"KVLANE_PODS_FILE": str(file), "KVLANE_PODS_NAME": "localhost"}
        environ |= {"KVLANE_RECORD": str(tmp_path / "record.jsonl")}
        environ |= {"KVLANE_PODS_PORT": str(sim.pods[0].port)}
        async with App(load(example, environ, local(example, environ, sim.urls))) as app:
            assert len(app.fleet.ready) >= 2
            async with aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http:
                for number in range(6):
                    body = {"model": "poems", "messages": [{"role": "user", "content": f"question {number}"}]}
                    async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json=body) as response:
                        assert response.status == 200, await response.text()


def local(example: Path, environ: dict[str, str], urls: list[str]) -> dict[str, dict[str, Any]]:
    """What differs from the example: free ports, no certificates, and simulated pods in place of those it names."""
    pods = load(example, environ).pods
    overrides: dict[str, dict[str, Any]] = {"listen": {"host": "127.0.0.1", "port": 0, "tls": None}}
    overrides |= {"admin": {"host": "127.0.0.1", "port": 0, "tls": None}, "telemetry": {"accessLog": False}}
    if load(example, environ).extproc.is_on:
        overrides["extproc"] = {"host": "127.0.0.1", "port": 0}
    if pods.file is None:
        named = [
            {"labels": dict(pod.labels), "weight": pod.weight, "models": pod.models, "role": pod.role}
            | ({"dataParallel": {"size": pod.ranks_declared}} if pod.ranks_declared else {})
            for pod in pods.static
        ]
        named = named or [{}, {}]
        overrides["pods"] = {"static": [{"url": url, **pod} for url, pod in zip(urls, named, strict=False)]}
    return overrides
