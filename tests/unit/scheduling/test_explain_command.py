"""`kvlane explain --state FILE`: JSON or YAML in, JSON out."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli.explain import explain

YAML = """
scheduling:
  plugins: [{type: queue-scorer}]
endpoints:
  - {name: a, metrics: {waiting: 2}}
  - {name: b}
"""
AS_JSON = json.dumps(
    {
        "scheduling": {"plugins": [{"type": "queue-scorer"}]},
        "endpoints": [{"name": "a", "metrics": {"waiting": 2}}, {"name": "b"}],
    }
)


def run(source: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(explain, ["--state", source], input=stdin)


@pytest.mark.parametrize("text", [YAML, AS_JSON])
def test_both_notations_and_stdin_are_equivalent(tmp_path: Path, text: str) -> None:
    file = tmp_path / "state"
    file.write_text(text)
    for result in (run(str(file)), run("-", text)):
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["decision"] == {"target": "b"}


def test_a_json_prompt_may_resemble_a_variable() -> None:
    state = {**json.loads(AS_JSON), "request": {"prompt": "costs ${AMOUNT} and $$"}}
    assert run("-", json.dumps(state)).exit_code == 0


def test_a_scheduling_error_is_a_result() -> None:
    result = run("-", '{"scheduling": {"plugins": [{"type": "queue-scorer"}]}}')
    assert result.exit_code == 0
    assert set(json.loads(result.stdout)["error"]) == {"type", "message"}


def test_bad_input_is_exit_code_2_with_every_fault_on_stderr() -> None:
    result = run("-", '{"endpoints": [{"nam": "x"}], "scheduling": {"plugins": [{"type": "queue-scorerr"}]}}')
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "endpoints[0]: unknown field 'nam'" in result.stderr
    assert "scheduling.plugins.queue-scorerr: unknown plugin type" in result.stderr


@pytest.mark.parametrize("text", ["{", "a: [", "- 1", "just text", ""])
def test_an_invalid_state_is_exit_code_2_or_empty(text: str) -> None:
    result = run("-", text)
    assert result.exit_code == (0 if text == "" else 2)


def test_a_missing_file_is_exit_code_2(tmp_path: Path) -> None:
    result = run(str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_the_default_profile_is_explained() -> None:
    match = {"blocks": 4, "total": 4, "blockSize": 64}
    state = {"request": {"promptTokens": 256}, "endpoints": [{"name": "cold"}, {"name": "warm", "prefixMatch": match}]}
    body = json.loads(run("-", json.dumps(state)).stdout)
    (scorer,) = body["profiles"]["default"]["scorers"]
    assert (scorer["name"], scorer["weight"], scorer["scores"]["warm"]) == ("latency-scorer", 1.0, 1.0)
    assert scorer["scores"]["cold"] < 1.0
    assert body["profiles"]["default"]["totals"] == scorer["scores"]
    assert body["decision"] == {"target": "warm"}
