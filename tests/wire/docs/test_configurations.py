"""What the pages show of YAML loads, and what they show of `kvlane check` and `kvlane explain` is what those print."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.config.reference import settings_page
from proxy.fleet.discovery.file import parse_pods
from tests.helpers.docs.greenest import installed
from tests.helpers.docs.pages import ROOT, Block, sessions, yaml_blocks

TYPOS = """
listen: {prot: 8000}
pods:
  static: [{url: http://vllm-0:8000}]
  refresh: {interval: 250 ms}
scheduling:
  plugins: [{type: queue-scorr}]
"""


@pytest.fixture(autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("site")):
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_every_kind_of_yaml_is_documented() -> None:
    kinds = {kind: len(yaml_blocks(kind)) for kind in ("configurations", "pods", "situations")}
    assert kinds["configurations"] >= 5
    assert min(kinds.values()) >= 1


@pytest.mark.parametrize("block", yaml_blocks("configurations"), ids=str)
def test_a_documented_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(block.text)
    result = run("check", "-c", str(file))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("block", yaml_blocks("pods"), ids=str)
def test_a_documented_list_of_pods_is_valid(block: Block) -> None:
    assert parse_pods(block.text)


def test_the_documented_faults_are_the_printed_ones(tmp_path: Path) -> None:
    ((_, shown),) = sessions("kvlane check")
    file = tmp_path / "typo.yaml"
    file.write_text(TYPOS)
    assert run("check", "-c", str(file)).stderr == shown


def test_the_documented_explanation_is_the_printed_one(tmp_path: Path) -> None:
    (situation,) = yaml_blocks("situations")
    ((command, shown),) = sessions("kvlane explain")
    assert command.endswith("| jq -c '.profiles.default | .scorers[], {totals}'")
    file = tmp_path / "situation.yaml"
    file.write_text(situation.text)
    result = run("explain", "--state", str(file))
    assert result.exit_code == 0, result.output
    profile = orjson.loads(result.stdout)["profiles"]["default"]
    expected = [*profile["scorers"], {"totals": profile["totals"]}]
    assert [orjson.loads(line) for line in shown.splitlines()] == expected


class TestTheSettingsReference:
    def test_the_page_is_current(self) -> None:
        page = (ROOT / "docs" / "configuration.md").read_text()
        assert page == settings_page(), "run: make pages"

    def test_the_flag_prints_the_page_and_needs_no_configuration(self) -> None:
        assert run("check", "--reference").stdout == settings_page()

    @pytest.mark.parametrize(
        "row",
        [
            "| `maxBody` | size | `64MiB` |",
            "| `static[].url` | text | required |",
            "| `refresh.interval` | duration | `250ms` |",
            "| `timeouts.request` | duration | `30m` |",
            "| `accessLog` | boolean | `true` |",
            "| `logLevel` | `debug`, `info`, `warning`, `error` | `info` |",
        ],
    )
    def test_a_row_has_key_type_and_default_in_yaml(self, row: str) -> None:
        assert f"\n{row}" in settings_page()

    def test_bounds_are_documented(self) -> None:
        (row,) = (line for line in settings_page().splitlines() if line.startswith("| `retries.attempts` |"))
        assert row.endswith("(at least 1) |")

    def test_exactly_the_parsed_sections_are_documented(self) -> None:
        headings = [line.removeprefix("## ") for line in settings_page().splitlines() if line.startswith("## ")]
        effective = orjson.loads(run("check", "--pod", "http://pod:1", "--json").stdout)
        assert set(headings) - {"Not yet"} == set(effective) - {"scheduling"}
