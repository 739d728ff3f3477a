from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.telemetry.metrics import Catalogue
from tests.helpers.telemetry.fakes import World

DEPLOY = Path(__file__).parents[3] / "config" / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))

SERIES = re.compile(r"\bkvlane_[a-z0-9_]+")
SELECTOR = re.compile(r"\b(kvlane_[a-z0-9_]+)\{([^}]*)\}")
RECORDED = re.compile(r"\b[a-z_]+:[a-z_]+:[a-z0-9_]+")
"""What Prometheus's rules make of them; tests/system/telemetry/test_rules.py knows which there are."""
LABELS = re.compile(r"([a-z_]+)\s*[=!]~?")


def expressions(dashboard: Any) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (variable["definition"] for variable in dashboard["templating"]["list"])


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def test_dashboards_exist() -> None:
    assert DASHBOARDS


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_series_of_a_dashboard_is_in_the_catalogue(path: Path) -> None:
    known = set(Catalogue("test").sample_names)
    queried = {name for expression in expressions(load(path)) for name in SERIES.findall(RECORDED.sub("", expression))}
    assert len(queried) > 7
    assert queried <= known


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_label_a_dashboard_selects_by_is_one_of_its_series(path: Path) -> None:
    labels = {name: {*family.labels, "le"} for family in Catalogue("t").families for name in family.sample_names}
    for expression in expressions(load(path)):
        for name, selectors in SELECTOR.findall(expression):
            assert set(LABELS.findall(selectors)) <= labels[name], expression


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_do_not_overlap_and_have_an_id_each(path: Path) -> None:
    panels = load(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_dashboards_link_to_each_other() -> None:
    for dashboard in map(load, DASHBOARDS):
        assert set(dashboard["links"][0]["tags"]) <= set(dashboard["tags"])
    assert len({load(path)["uid"] for path in DASHBOARDS}) == len(DASHBOARDS)


def test_the_dashboards_read_from_the_provisioned_source() -> None:
    (source,) = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    panels = [panel for dashboard in map(load, DASHBOARDS) for panel in dashboard["panels"]]
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {source["uid"]}


def test_prometheus_scrapes_the_admin_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "kvlane"
    assert job["static_configs"] == [{"targets": ["kvlane:9190"]}]


def test_process_series_of_the_dashboards_are_exposed() -> None:
    texts = [text for dashboard in map(load, DASHBOARDS) for text in expressions(dashboard)]
    queried = {name for text in texts for name in re.findall(r"\bprocess_[a-z_]+", text)}
    assert queried
    assert all(name in World().scrape().text for name in queried)
