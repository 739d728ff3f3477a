"""Removed settings are refused, and the error names their replacement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.cli import main
from proxy.core.errors import ConfigError
from proxy.core.params import REMOVED
from proxy.core.registry import Registry
from proxy.settings import from_mapping

CHANGELOG = (Path(__file__).parents[3] / "docs" / "changelog.md").read_text()
PLUGINS = {cls.plugin_type for cls in Registry.discover()}


def nested(path: str) -> dict[str, Any]:
    """A mapping with something at this path."""
    value: Any = "5s"
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def faults(configuration: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_mapping(configuration)
    return list(map(str, caught.value.problems))


@pytest.mark.parametrize("key", REMOVED)
def test_the_refusal_of_a_removed_key_names_its_replacement(key: str) -> None:
    first, _, rest = key.partition(".")
    if first in PLUGINS:
        path = f"scheduling.plugins.mine.parameters.{rest}"
        configuration: dict[str, Any] = {"plugins": [{"type": first, "name": "mine", "parameters": nested(rest)}]}
        configuration = {"scheduling": configuration}
    else:
        path = key.replace("*", "default")
        configuration = nested(path)
    assert f"{path}: was removed: {REMOVED[key]}" in faults(configuration)


def test_a_removed_key_of_a_further_pool_is_named_with_the_path_of_the_pool() -> None:
    written = {"pools": {"large": {"pods": {"warmup": {"prompts": 3, "sample": 4}}}}}
    assert faults(written) == ["pools.large.pods.warmup.sample: was removed: it is always one response in 8"]


def test_check_names_the_replacement(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("reliability: {breaker: {probes: 2}}")
    result = CliRunner().invoke(main, ["check", "-c", str(file)])
    assert result.exit_code == 2
    assert "reliability.breaker.probes: was removed: it is always 1 request" in result.output


@pytest.mark.parametrize("key", REMOVED)
def test_the_changelog_lists_a_removed_key(key: str) -> None:
    assert f"`{key}`" in CHANGELOG
