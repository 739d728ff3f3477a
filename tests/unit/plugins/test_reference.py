"""docs/plugins.md is what the classes say."""

import json
from pathlib import Path

from click.testing import CliRunner

from proxy.cli.configuration import plugins
from proxy.config.reference import plugins_page, reference
from proxy.core.registry import Registry

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(plugins, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_page_is_current() -> None:
    expected = plugins_page([reference(cls) for cls in Registry.discover()])
    assert PAGE.read_text() == expected, "run: make pages"


def test_the_markdown_flag_prints_the_page() -> None:
    assert run("--markdown") == plugins_page([reference(cls) for cls in Registry.discover()])


def test_without_a_type_every_one_is_listed_with_its_extension_points() -> None:
    lines = dict(line.split(maxsplit=1) for line in run().splitlines())
    assert lines["queue-scorer"] == "Scorer"
    assert lines["context-length-aware"] == "Filter, Scorer"
    assert set(lines) == {cls.plugin_type for cls in Registry.discover()}


def test_a_type_is_described_with_its_parameters_nested_ones_included() -> None:
    page = run("endpoint-attribute-scorer")
    assert "algorithm.normalization.fixedRange.min: number, default required" in page
    assert "producer: text, default empty" in page


def test_json_has_type_extension_points_and_parameters() -> None:
    described = json.loads(run("load-aware-scorer", "--json"))
    assert described["type"] == "load-aware-scorer"
    assert described["extensionPoints"] == ["Scorer"]
    (parameter,) = described["parameters"]
    assert (parameter["name"], parameter["type"], parameter["default"]) == ("threshold", "integer", 128)
    assert len(json.loads(run("--json"))) == len(list(Registry.discover()))


def test_ports_are_not_parameters() -> None:
    (parameter,) = json.loads(run("max-score-picker", "--json"))["parameters"]
    assert parameter["name"] == "maxNumOfEndpoints"


def test_an_unknown_type_gets_a_suggestion() -> None:
    result = CliRunner().invoke(plugins, ["queue-scorerr"])
    assert result.exit_code == 2
    assert "did you mean 'queue-scorer'?" in result.output
