"""`kvlane autoscale`, as it is typed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.unit.autoscale.test_replay import recorded

QUESTION_ROLES = [
    {"name": "prefill", "min": 1, "max": 20, "current": 4},
    {"name": "decode", "min": 1, "max": 40, "current": 6},
]
QUESTION = {
    "roles": QUESTION_ROLES,
    "coordination": {"mode": "Preferred", "preferred_ratio": {"prefill": {"min": 15, "max": 35}}},
    "total": 10,
    "metrics": {"prefill": {"queue_depth": 32, "ttft": 3.0}, "decode": {"queue_depth": 0, "kv_cache_utilization": 0.2}},
}

POLICY = """
autoscale:
  pools:
    default:
      roles:
        - {name: prefill, min: 1, max: 20, metrics: [{name: backlog_seconds, kind: total, target: 1.5}]}
        - {name: decode, min: 1, max: 40, gpus: 2, metrics: [{name: kv_sum, kind: total, target: 0.8}]}
      behavior: {scaleUp: {instances: 1, percent: 0}, panic: {hold: 0s}}
"""


def run(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["autoscale", *(str(argument) for argument in arguments)], input=stdin)


def evaluated(**changed: Any) -> Result:
    return run("eval", "-", stdin=json.dumps({**QUESTION, **changed}))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.yaml"
    file.write_text(POLICY)
    return file


class TestEval:
    def test_the_result_is_json(self, tmp_path: Path) -> None:
        file = tmp_path / "question.json"
        file.write_text(json.dumps(QUESTION))
        result = run("eval", file)
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert shown["replicas"] == {"prefill": 3, "decode": 7}
        assert (shown["applied"], shown["band_satisfied"], shown["reasons"]) == ("preferred", True, [])

    def test_in_panic_nothing_moves(self) -> None:
        shown = json.loads(evaluated(panic=True, total=18).stdout)
        assert (shown["applied"], shown["reasons"]) == ("panic", ["PanicMode"])
        assert shown["replicas"] == {"prefill": 8, "decode": 10}

    def test_an_unreadable_optional_value_is_ignored_and_reported(self) -> None:
        coordination = {"mode": "Preferred", "preferred_ratio": {"prefill": {"min": -80, "max": -20}}, "alpah": 1}
        roles = [{**QUESTION_ROLES[0], "curent": 4}, QUESTION_ROLES[1]]
        result = evaluated(coordination=coordination, metrics={"prefil": {}}, roles=roles, panick=True)
        assert result.exit_code == 0
        assert "BandIgnored" in json.loads(result.stdout)["reasons"]
        for fault in (
            "preferred_ratio.prefill.min",
            "did you mean 'alpha'?",
            "did you mean 'prefill'?",
            "'current'?",
            "'panic'?",
        ):
            assert fault in result.stderr

    def test_minima_above_the_total_are_a_warning(self) -> None:
        bands = {"prefill": {"min": 80, "max": 100}, "decode": {"min": 80, "max": 100}}
        result = evaluated(coordination={"mode": "Preferred", "preferred_ratio": bands})
        assert "Warning: coordination.preferred_ratio: sum of min ratios must not exceed 100" in result.stderr
        assert "Ignored" not in result.stderr
        assert json.loads(result.stdout)["reasons"] != []

    def test_a_number_out_of_range_is_clamped(self) -> None:
        far, near = (evaluated(coordination={"mode": "Preferred", "alpha": alpha}) for alpha in (7, 1))
        assert "coordination.alpha: must be between 0 and 1" in far.stderr
        assert far.stdout == near.stdout

    @pytest.mark.parametrize(
        ("changed", "faults"),
        [
            ({"roles": [{"name": "", "min": 3, "max": 2}]}, ["roles[0].name", "roles[0].min"]),
            ({"roles": {}, "total": 2.5}, ["roles:", "total: must be an integer"]),
            ({"total": True}, ["total"]),
            (
                {"total": "ten", "coordination": {"mode": "sometimes", "preferred_ratio": {"prefil": {}}}},
                ["total", "coordination.mode", "coordination.preferred_ratio: there is no role 'prefil'"],
            ),
            (
                {"roles": [{"name": "a", "min": 0, "max": 10**400, "current": 10**400}]},
                ["roles[0].max", "roles[0].current"],
            ),
        ],
    )
    def test_without_roles_and_a_total_there_is_no_result(self, changed: dict[str, Any], faults: list[str]) -> None:
        result = evaluated(**changed)
        assert (result.exit_code, result.stdout) == (2, "")
        assert all(fault in result.stderr for fault in faults)

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"roles": ' + "[" * 100_000])
    def test_an_invalid_input_is_refused(self, text: str) -> None:
        assert run("eval", "-", stdin=text).exit_code == 2

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        result = run("eval", tmp_path / "none.json")
        assert result.exit_code == 2
        assert "cannot be read" in result.stderr


class TestValidate:
    def test_a_valid_policy_is_accepted(self, policy: Path) -> None:
        result = run("validate", policy)
        assert (result.exit_code, result.stderr) == (0, "The policy is good.\n")

    def test_all_faults_are_reported_with_their_paths(self, policy: Path) -> None:
        policy.write_text(POLICY.replace("min: 1, max: 20", "min: 3, max: 2").replace("kind: total", "kind: sum"))
        result = run("validate", policy)
        assert result.exit_code == 2
        assert "3 faults" in result.stderr
        assert "autoscale.pools.default.roles[0].min: must be <= max" in result.stderr

    def test_likely_mistakes_are_warned_of(self, policy: Path) -> None:
        policy.write_text(POLICY + "      gpuBudget: 4\n")
        result = run("validate", policy)
        assert result.exit_code == 0
        assert "Warning: autoscale.pools.default.gpuBudget" in result.stderr

    @pytest.mark.parametrize("text", ["", "3", "listen: {port: 1}", "autoscale: {", "autoscale: {pools: {a: {}}}"])
    def test_an_invalid_policy_is_refused(self, policy: Path, text: str) -> None:
        policy.write_text(text)
        assert run("validate", policy).exit_code == 2


class TestReplay:
    @pytest.fixture
    def history(self, tmp_path: Path) -> Path:
        file = tmp_path / "history.json"
        file.write_text(json.dumps({"pool": "default", "decisions": asyncio.run(recorded())}))
        return file

    def test_both_policies_are_compared(self, history: Path, policy: Path) -> None:
        result = run("replay", history, "-c", policy)
        assert result.exit_code == 0, result.output
        about, heads, *rows = result.stdout.splitlines()
        assert about.startswith("pool default: 8 decisions, 7 of them with metrics, ")
        assert heads.split() == ["recorded", "replayed"]
        assert [row[:14].strip() for row in rows] == ["replicas moved", "replica hours", "GPU hours"]

    def test_every_step_is_available_as_json(self, history: Path, policy: Path) -> None:
        result = run("replay", history, "-c", policy, "--json")
        steps = json.loads(result.stdout)["steps"]
        assert len(steps) == 8
        assert sum(steps[2]["recorded"].values()) == 23
        assert sum(steps[2]["replayed"].values()) == 11
        assert steps[6]["replayed"] is None

    def test_lines_and_lists_are_read_too(self, history: Path, policy: Path) -> None:
        expected = run("replay", history, "-c", policy).stdout
        decisions = json.loads(history.read_text())["decisions"]
        history.write_text(json.dumps(decisions))
        assert run("replay", history, "-c", policy).stdout == expected
        lines = "\n".join(json.dumps(one) for one in decisions)
        assert run("replay", "-", "-c", policy, "--pool", "default").exit_code == 2
        assert CliRunner().invoke(main, ["autoscale", "replay", "-", "-c", str(policy)], input=lines).stdout == expected

    def test_one_of_several_pools_must_be_chosen(self, history: Path, policy: Path) -> None:
        decisions = json.loads(history.read_text())["decisions"]
        history.write_text(json.dumps([*decisions, {**decisions[0], "pool": "other"}]))
        assert "give --pool" in run("replay", history, "-c", policy).stderr
        assert run("replay", history, "-c", policy, "--pool", "default").exit_code == 0
        assert "the policy has no pool 'other'" in run("replay", history, "-c", policy, "--pool", "other").stderr
        assert "did you mean 'default'?" in run("replay", history, "-c", policy, "--pool", "defualt").stderr

    def test_entries_without_a_pool_are_no_decisions(self, tmp_path: Path, policy: Path) -> None:
        file = tmp_path / "question.json"
        file.write_text('{"total": 8}')
        assert f"{file}: holds no decisions" in run("replay", file, "-c", policy).stderr

    @pytest.mark.parametrize("text", ["", "3", "[]", "[3]", "{\n}{", '{"decisions": 3}'])
    def test_an_invalid_history_is_refused(self, tmp_path: Path, policy: Path, text: str) -> None:
        file = tmp_path / "history.json"
        file.write_text(text)
        assert run("replay", file, "-c", policy).exit_code == 2
