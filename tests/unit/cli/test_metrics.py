"""docs/metrics.md equals the catalogue of metrics."""

from __future__ import annotations

from click.testing import CliRunner

from proxy.cli import main
from tests.helpers.cli.kvlane import ROOT


def test_the_page_equals_the_catalogue() -> None:
    written = CliRunner().invoke(main, ["metrics", "--markdown"]).output
    assert (ROOT / "docs" / "metrics.md").read_text() == written, "run: make pages"


def test_every_series_is_listed_with_labels_and_meaning() -> None:
    lines = CliRunner().invoke(main, ["metrics"]).output.splitlines()
    assert any(line.startswith("kvlane_requests_total{model,path,outcome,status}  Requests") for line in lines)
    assert all(line.startswith("kvlane_") and len(line.split("  ", 1)[1]) > 10 for line in lines)
