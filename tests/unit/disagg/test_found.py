"""Connectors are registered by their files, connectors of other packages by entry points."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.core import params
from proxy.core.errors import ConfigError
from proxy.disagg.connectors import NAMES, connector_named
from proxy.disagg.settings import DisaggregationSettings

FILE = '''
"""Both pods read and write one disk array."""

from proxy.disagg.connector import Connector, Split


class Array(Connector):
    name = "disk-array"

    def split(self, request_id, prefill, decode, random):
        return Split({"array": request_id}, None)

    def hand_over(self, body):
        return {"array": body["array"]}
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a package is installed that brings a connector."""
    info = tmp_path / "kvlane_array-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlane-array\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvlane.connectors]\narray = kvlane_array\n")
    (tmp_path / "kvlane_array.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("kvlane_array", None)


def test_every_file_of_the_folder_is_a_connector_of_its_name() -> None:
    folder = Path(sys.modules["proxy.disagg.connectors"].__path__[0])
    assert len(NAMES) == len(list(folder.glob("*.py"))) - 1  # of the package itself
    assert [connector_named(name).name for name in NAMES] == list(NAMES)


def test_a_connector_of_another_package_is_configured_by_its_name(site: Path) -> None:
    assert params.load(DisaggregationSettings, {"connector": "disk-array"}).connector == "disk-array"
    assert connector_named("disk-array")().hand_over({"array": 7}) == {"array": 7}


def test_a_near_miss_of_it_gets_a_suggestion(site: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'disk-array'"):
        params.load(DisaggregationSettings, {"connector": "disc-array"})


def test_without_the_package_it_is_unknown() -> None:
    with pytest.raises(ConfigError, match="connector: there is no 'disk-array'"):
        params.load(DisaggregationSettings, {"connector": "disk-array"})


def test_a_broken_package_is_reported_and_affects_no_other_connector(site: Path) -> None:
    (site / "kvlane_array.py").write_text("import nothing_of_that_name")
    assert connector_named("nixl").name == "nixl"
    with pytest.raises(ConfigError, match="entry point array = kvlane_array"):
        connector_named("disk-array")
