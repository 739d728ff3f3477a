"""Every alert of config/deploy fires when it should, by Prometheus's own tool, and none where all is well."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.telemetry.metrics import Catalogue

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "config" / "deploy" / "prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
DASHBOARDS = sorted((PROMETHEUS.parent / "grafana" / "dashboards").glob("*.json"))

SERIES = re.compile(r"\bkvlane_[a-z0-9_]+")
RECORDED = re.compile(r"\b[a-z_]+:[a-z_]+:[a-z0-9_]+\b")
SELECTOR = re.compile(r"(?<![:\w])(kvlane_[a-z0-9_]+)\{([^}]*)\}")
LABELS = re.compile(r"([a-z_]+)\s*[=!]~?")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed; in Debian: apt-get install prometheus"
)

OK = 'kvlane_requests_total{job="kvlane", instance="a", model="m", path="chat", outcome="complete", status="2xx"}'
FAILED = 'kvlane_requests_total{job="kvlane", instance="a", model="m", path="chat", outcome="refused", status="5xx"}'
FIRST_TOKEN = 'kvlane_time_to_first_token_seconds_bucket{job="kvlane", model="m", stream="true", le="%s"}'
READY, EJECTED = (
    f'kvlane_endpoint_state{{job="kvlane", instance="a", endpoint="pod-%d", state="{s}"}}' for s in ("ready", "ejected")
)
WAITED = 'kvlane_queue_wait_seconds_%s{job="kvlane", pool="default", band="0"%s}'
STAGE = 'kvlane_disagg_stage_duration_seconds_count{job="kvlane", stage="prefill", ending="%s"}'

HEALTHY: Mapping[str, str] = {
    'up{job="kvlane", instance="a"}': "1x400",
    'kvlane_pool_ready_endpoints{pool="default"}': "4x400",
    OK: "0+600x400",
    FAILED: "0+0x400",
    FIRST_TOKEN % "10.0": "0+600x400",
    FIRST_TOKEN % "+Inf": "0+600x400",
    READY % 0: "1x400",
    READY % 1: "1x400",
    'kvlane_endpoint_scrape_age_seconds{job="kvlane", instance="a", endpoint="pod-0"}': "0.2x400",
    'kvlane_attempts_total{job="kvlane", endpoint="pod-0", ending="complete"}': "0+600x400",
    'kvlane_attempts_total{job="kvlane", endpoint="pod-0", ending="client-gone"}': "0+100x400",
    "kvlane_event_loop_lag_seconds": "0.001x400",
    "kvlane_config_last_reload_successful": "1x400",
    "kvlane_replicas_store_up": "1x400",
    "kvlane_replicas_disagreeing": "0x400",
    "kvlane_latency_prediction_error_ratio": "0.1x400",
    WAITED % ("bucket", ', le="10.0"'): "0+600x400",
    WAITED % ("bucket", ', le="+Inf"'): "0+600x400",
    WAITED % ("count", ""): "0+600x400",
    STAGE % "complete": "0+600x400",
    'kvlane_autoscale_valid{pool="default"}': "1x400",
    'kvlane_autoscale_desired_replicas{pool="default", role="decode"}': "2x400",
    'kvlane_autoscale_ready_replicas{pool="default", role="decode"}': "2x400",
    "kvlane_access_log_lines_lost_total": "0x400",
    "kvlane_log_lines_lost_total": "0x400",
}
"""A value a minute, of a fleet with nothing to complain of."""

FIRED: Mapping[str, tuple[Mapping[str, str], str]] = {
    "KvlaneDown": ({'up{job="kvlane", instance="a"}': "0x400"}, "5m"),
    "KvlaneNoReadyPods": ({'kvlane_pool_ready_endpoints{pool="default"}': "0x400"}, "5m"),
    "KvlaneRequestsFailFast": ({OK: "0+600x400", FAILED: "0+20x400"}, "65m"),
    "KvlaneRequestsFail": ({OK: "0+600x400", FAILED: "0+5x400"}, "380m"),
    "KvlaneFirstTokenLate": ({FIRST_TOKEN % "10.0": "0+300x400", FIRST_TOKEN % "20.0": "0+600x400"}, "20m"),
    "KvlaneDefect": ({'kvlane_refused_total{reason="internal-error"}': "_x20 1x400"}, "25m"),
    "KvlanePoison": ({'kvlane_refused_total{reason="suspected-poison"}': "0x20 1x400"}, "25m"),
    "KvlanePodEjected": ({EJECTED % 0: "1x400", **{READY % n: "1x400" for n in range(1, 9)}}, "10m"),
    "KvlaneManyPodsEjected": ({EJECTED % 0: "1x400", READY % 1: "1x400"}, "10m"),
    "KvlanePodFlaps": ({'kvlane_endpoint_transitions_total{endpoint="pod-0", state="ejected"}': "0+1x400"}, "20m"),
    "KvlanePodFails": (
        {'kvlane_attempts_total{job="kvlane", endpoint="pod-0", ending="upstream-failed"}': "0+200x400"},
        "20m",
    ),
    "KvlaneRetriesMany": ({'kvlane_retries_total{job="kvlane"}': "0+100x400"}, "20m"),
    "KvlaneScrapesStale": (
        {'kvlane_endpoint_scrape_age_seconds{job="kvlane", instance="a", endpoint="pod-0"}': "0+60x400"},
        "10m",
    ),
    "KvlanePoolFull": (
        {
            'kvlane_pool_kv_cache_usage_ratio_mean{pool="default"}': "0.99x400",
            'kvlane_pool_waiting_requests_mean{pool="default"}': "8x400",
        },
        "15m",
    ),
    "KvlanePrefixIndexWrong": ({'kvlane_endpoint_prefix_prediction_error_ratio{endpoint="pod-0"}': "0.6x400"}, "35m"),
    "KvlanePredictionsInaccurate": ({"kvlane_latency_prediction_error_ratio": "0.6x400"}, "35m"),
    "KvlaneScorerFaults": ({'kvlane_scorer_faults_total{plugin="mine", fault="raised"}': "_x20 1x400"}, "25m"),
    "KvlaneQueueSlow": (
        {WAITED % ("bucket", ', le="10.0"'): "0+300x400", WAITED % ("bucket", ', le="20.0"'): "0+600x400"},
        "20m",
    ),
    "KvlaneQueueRefuses": (
        {
            'kvlane_queue_refused_total{job="kvlane", pool="default", band="0", reason="rejected-saturated"}': (
                "0+100x400"
            )
        },
        "20m",
    ),
    "KvlaneStagesFail": ({STAGE % "upstream-failed": "0+100x400"}, "20m"),
    "KvlaneAutoscaleBlind": ({'kvlane_autoscale_valid{pool="default"}': "0x400"}, "10m"),
    "KvlaneActuationFails": (
        {'kvlane_autoscale_actuations_total{pool="p", role="r", actuator="webhook", result="error"}': "_x20 1x400"},
        "25m",
    ),
    "KvlaneScalingStuck": ({'kvlane_autoscale_desired_replicas{pool="default", role="decode"}': "4x400"}, "35m"),
    "KvlaneLoopLags": ({"kvlane_event_loop_lag_seconds": "0.3x400"}, "10m"),
    "KvlaneReloadFailed": ({"kvlane_config_last_reload_successful": "0x400"}, "10m"),
    "KvlaneTaskFails": ({'kvlane_task_failures_total{task="refresh"}': "0+1x400"}, "20m"),
    "KvlaneWorkersRestart": ({"kvlane_worker_restarts_total": "0+1x400"}, "20m"),
    "KvlaneLogLinesLost": ({"kvlane_log_lines_lost_total": "0+1x400"}, "20m"),
    "KvlaneReplicasAlone": ({"kvlane_replicas_store_up": "0x400"}, "10m"),
    "KvlaneReplicasDisagree": ({"kvlane_replicas_disagreeing": "1x400"}, "15m"),
}
"""What differs from a healthy fleet, and when the alert has to be there."""


def rules() -> list[dict[str, Any]]:
    return [rule for path in RULES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[str]:
    return [rule["alert"] for rule in rules() if "alert" in rule]


def expressions() -> Sequence[str]:
    return [rule["expr"] for rule in rules()]


def test_every_series_of_a_rule_is_in_the_catalogue() -> None:
    queried = {name for text in expressions() for name in SERIES.findall(RECORDED.sub("", text))}
    assert len(queried) > 20
    assert queried <= set(Catalogue("test").sample_names)


def test_every_label_a_rule_selects_by_is_one_of_its_series() -> None:
    labels = {name: {*family.labels, "le"} for family in Catalogue("t").families for name in family.sample_names}
    for text in expressions():
        for name, selectors in SELECTOR.findall(text):
            assert set(LABELS.findall(selectors)) <= labels[name], text


def test_alerts_and_dashboards_query_recorded_series_only() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    texts = [*expressions(), *(path.read_text() for path in DASHBOARDS)]
    queried = {name for text in texts for name in RECORDED.findall(text)}
    assert queried
    assert queried <= recorded


def test_every_alert_is_documented() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    assert re.findall(r"^\| `(Kvlane\w+)` \|", page, re.MULTILINE) == alerts()


def test_every_alert_has_a_test_that_fires_it() -> None:
    assert set(FIRED) == set(alerts())


def test_prometheus_gets_the_rules() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yml"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert "./config/deploy/prometheus:/etc/prometheus:ro" in compose["services"]["prometheus"]["volumes"]


@needs_promtool
def test_promtool_accepts_rules_and_configuration(tmp_path: Path) -> None:
    promtool("check", "rules", *map(str, RULES))
    config = (PROMETHEUS / "prometheus.yml").read_text().replace("/etc/prometheus/rules", str(PROMETHEUS / "rules"))
    (tmp_path / "prometheus.yml").write_text(config)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


@needs_promtool
def test_every_alert_fires_in_its_test_and_none_for_a_healthy_fleet(tmp_path: Path) -> None:
    firing = 'count(ALERTS{alertname="%s", alertstate="firing"})'
    quiet: list[Mapping[str, Any]] = [{"expr": "ALERTS", "eval_time": at, "exp_samples": []} for at in ("30m", "390m")]
    cases = [case(HEALTHY, quiet)]
    for name, (differs, at) in FIRED.items():
        expected = {"expr": firing % name, "eval_time": at, "exp_samples": [{"labels": "{}", "value": 1}]}
        cases.append(case({**HEALTHY, **differs}, [expected]))
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": list(map(str, RULES)), "tests": cases}))
    promtool("test", "rules", str(file))


@needs_promtool
def test_prometheus_parses_the_queries_of_dashboards(tmp_path: Path) -> None:
    queried = [
        re.sub(r"\$\w+", ".*", target["expr"].replace("$__rate_interval", "5m"))
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]
    as_rules = [{"record": f"asked:{number}", "expr": text} for number, text in enumerate(queried)]
    file = tmp_path / "asked.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": as_rules}]}))
    promtool("check", "rules", str(file))


def case(series: Mapping[str, str], expected: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": list(expected)}


def promtool(*arguments: str) -> None:
    ran = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
