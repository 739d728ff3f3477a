"""Rules that give kvlane's series the names of the endpoint picker's, by Prometheus's own tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.telemetry.metrics import Catalogue
from tests.system.telemetry.test_rules import PROMETHEUS, SERIES, case, needs_promtool, promtool

FILE = PROMETHEUS / "names" / "endpoint-picker.yml"
RULES: Sequence[Mapping[str, str]] = [
    rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
]

KEPT = re.compile(r"^sum by \(([^)]*)\)")
REPLACED = re.compile(r'"(\w+)", "\$1", "(\w+)", "\(\.\*\)"')

REPORTED = {
    'kvlane_requests_total{job="k", instance="a", model="m", path="chat", outcome="complete", status="2xx"}': "7x9",
    'kvlane_requests_total{job="k", instance="a", model="m", path="chat", outcome="refused", status="5xx"}': "2x9",
    'kvlane_pool_waiting_requests_mean{job="k", instance="a", pool="p"}': "3x9",
    'kvlane_queue_requests{job="k", instance="a", pool="p", band="-1"}': "5x9",
}
OF = 'job="k", instance="a"'
EXPECTED = {
    f'inference_objective_request_total{{{OF}, model_name="m"}}': 9,
    f'inference_objective_request_error_total{{{OF}, model_name="m", error_code="5xx"}}': 2,
    f'inference_pool_average_queue_size{{{OF}, name="p"}}': 3,
    f'inference_extension_flow_control_queue_size{{{OF}, inference_pool="p", priority="-1"}}': 5,
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["record"])
def test_a_rule_uses_existing_series_and_labels(rule: Mapping[str, str]) -> None:
    known = {name: {*family.labels, "le"} for family in Catalogue("t").families for name in family.sample_names}
    (series,) = SERIES.findall(rule["expr"])
    made = dict(REPLACED.findall(rule["expr"]))
    kept = KEPT.match(rule["expr"])
    assert kept is not None
    assert set(made.values()) <= known[series]
    assert set(kept[1].split(", ")) - {"job", "instance"} - set(made) <= known[series]


@needs_promtool
def test_series_of_other_routers_have_kvlanes_values(tmp_path: Path) -> None:
    promtool("check", "rules", str(FILE))
    queried: list[Mapping[str, Any]] = [
        {"expr": name, "eval_time": "5m", "exp_samples": [{"labels": name, "value": value}]}
        for name, value in EXPECTED.items()
    ]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "tests": [case(REPORTED, queried)]}))
    promtool("test", "rules", str(file))
