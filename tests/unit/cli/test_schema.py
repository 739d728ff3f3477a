"""What `kvlane schema` prints takes what loads, and refuses what does not."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from proxy.cli import main
from proxy.config.schema import schema
from proxy.core.errors import ConfigError
from proxy.core.params import plain, yaml_key
from proxy.core.registry import Registry
from proxy.settings import DERIVED, Settings, from_mapping
from tests.helpers.cli.json_schema import Judge

CONFIG = Path(__file__).parents[3] / "config"
FILES = [*sorted(CONFIG.glob("*.yaml")), *sorted((CONFIG / "autoscale").glob("*.yaml"))]
MUTATED = ("autoscale", "disaggregated", "flow-control", "models", "multi-tenant", "pools", "prefix-aware")
WRITTEN = schema(Registry.discover())
JUDGE = Judge(WRITTEN)


def read(file: Path) -> Any:
    """As an editor sees it: YAML's dates are text."""
    return json.loads(json.dumps(yaml.safe_load(file.read_text()), default=str))


def faults(data: Any) -> list[str]:
    alone = data.get("kind") or "plugins" in data
    return JUDGE.faults(data, WRITTEN["$defs"]["scheduling"] if alone else None)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(item)


def loads(data: Any) -> bool:
    try:
        from_mapping(data)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_example_is_valid(file: Path) -> None:
    assert faults(read(file)) == []


def test_all_defaults_are_valid() -> None:
    settings = Settings()
    fields = [item for item in dataclasses.fields(Settings) if item.name not in DERIVED]
    assert faults({yaml_key(item): plain(getattr(settings, item.name)) for item in fields}) == []


@pytest.mark.parametrize("name", MUTATED)
def test_an_unknown_key_is_invalid(name: str) -> None:
    data = read(CONFIG / f"{name}.yaml")
    refused = 0
    for at in range(len(list(mappings(data)))):
        changed = copy.deepcopy(data)
        list(mappings(changed))[at]["nonsense"] = "x"
        if faults(changed):
            refused += 1
            assert not loads(changed)
    assert refused >= 3


@pytest.mark.parametrize(
    "text",
    [
        "listen: {prot: 1}",
        "listen: {port: -1}",
        "listen: {port: 65536}",
        "listen: {port: true}",
        "listen: {port: x}",
        "listen: {maxBody: 1 parsec}",
        "listen: []",
        "pods: {refresh: {interval: 5 minutes}}",
        "pods: {refresh: {maxCore: 0}}",
        "pods: {static: [{name: a}]}",
        "pods: {static: [{url: http://a:1, engine: tgi}]}",
        "pods: {static: [{url: http://a:1, labels: {a: []}}]}",
        "reliability: {retries: {'on': [418]}}",
        "scheduling: {plugins: [{type: queue-scorr}]}",
        "scheduling: {plugins: [{type: approx-prefix-cache-producer, parameters: {blockSize: []}}]}",
        "scheduling: {plugins: [{type: session-affinity-scorer, parameters: {strategy: luck}}]}",
        "scheduling: {schedulingProfiles: [{plugins: []}]}",
        "scheduling: {featureGates: [luck]}",
        "pools: {large: {pods: {statics: []}}}",
        "telemetry: {logLevel: loud}",
        "nonsense: {}",
    ],
)
def test_values_that_do_not_load_are_invalid(text: str) -> None:
    data = yaml.safe_load(text)
    assert not loads(data)
    assert faults(data)


@pytest.mark.parametrize(
    "text",
    [
        "listen: {port: 8000.0}",
        "listen: {maxBody: 1.5Gi, headTimeout: 1m30s}",
        "listen: {tls: {cert: a, minVersion: 1.3}}",
        "listen:",
        "reliability: {retries: {'on': [502, connect]}}",
        "reliability: {health: {path: null}}",
        "security: {apiKeys: [{name: a, key: b, expires: 2030-01-01, limits: {requestsPerMinute: 1}}]}",
        "scheduling: {featureGates: [flowControl=true], plugins: [{type: max-score-picker, parameters: null}]}",
    ],
)
def test_alternative_spellings_that_load_are_valid(text: str) -> None:
    data = yaml.safe_load(text)
    assert loads(data)
    assert faults(json.loads(json.dumps(data, default=str))) == []


def test_variables_may_stand_for_any_value() -> None:
    assert faults({"listen": {"port": "${PORT}", "maxBody": "${SIZE:-1k}", "headTimeout": "${T}"}}) == []
    assert faults({"telemetry": {"accessLog": "${LOG}", "logLevel": "${LEVEL}"}}) == []


def test_keys_have_descriptions_and_defaults() -> None:
    port = WRITTEN["$defs"]["ListenSettings"]["properties"]["port"]
    assert port["description"].startswith("port of the data port")
    assert port["default"] == 8000


def test_the_command_prints_or_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.schema.json"
    assert CliRunner().invoke(main, ["schema", "-o", str(file)]).exit_code == 0
    assert json.loads(file.read_text()) == json.loads(CliRunner().invoke(main, ["schema"]).stdout) == WRITTEN
    assert CliRunner().invoke(main, ["schema", "-o", str(tmp_path)]).exit_code == 2
