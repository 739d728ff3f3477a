"""`kvlane replay` and `kvlane tune`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.config.load import load
from proxy.lab.record import TraceRecord
from tests.helpers.lab.traffic import conversations, fleet, head, record, request, written
from tests.unit.lab.test_tune import BAD

CONFIG = Path(__file__).parents[3] / "config"

RANDOM = "scheduling: {plugins: [{type: random-picker}]}"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def lines_of(found: TraceRecord) -> list[dict[str, Any]]:
    """As a proxy writes it down, of prompts whose pieces are 64 tokens long."""
    return [
        request(
            job.arrival,
            chain=["".join(f"{node:08d}" for node in job.nodes)],
            estimated_tokens=64 * len(job.nodes),
            prompt_tokens=64 * len(job.nodes),
            output_tokens=job.output_tokens,
            cached_tokens=seen.cached_tokens,
            pod=seen.pod,
            ttft=seen.ttft,
            duration=seen.duration,
        )
        for job, seen in zip(found.workload.jobs, found.seen, strict=True)
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = record(conversations(200, 8.0), fleet())
    sizes = [{"pod": pod, "block_size": 16, "blocks": 8_000} for pod in found.pods]
    return written(tmp_path_factory.mktemp("record") / "record.jsonl", [head(), *sizes, *lines_of(found)])


def test_configurations_are_compared(recorded: Path, tmp_path: Path) -> None:
    for name in ("ours", "chance"):
        (tmp_path / f"{name}.yaml").write_text(RANDOM if name == "chance" else "{}")
    result = run("replay", recorded, "-c", tmp_path / "ours.yaml", "-c", tmp_path / "chance.yaml")
    assert result.exit_code == 0, result.output
    about, *table = result.stdout.splitlines()
    assert about.startswith("record: 200 requests")
    (heads,) = [line for line in table if "chance" in line]
    assert heads.split() == ["recorded", "repeated", "ours", "chance"]
    assert any(line.startswith("TTFT p90, s") and len(line.split()) == 7 for line in table)
    assert any("median error" in line for line in table)


def test_all_figures_are_available_as_json(recorded: Path) -> None:
    result = run("replay", recorded, "--json", "--pods", "6", "--load", "2", "--seeds", "2")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["requests"], shown["pods"], shown["load"]) == (200, 6, 2.0)
    assert list(shown["figures"]) == ["default"]
    assert shown["figures"]["default"]["ttft_mean"] > 0
    assert shown["fit"]["first_tokens"] >= 20


def test_a_trace_is_replayed_on_named_pods(tmp_path: Path) -> None:
    rows = [
        {"timestamp": at * 100, "input_length": 700, "output_length": 5, "hash_ids": [1, at + 2]} for at in range(40)
    ]
    trace = written(tmp_path / "trace.jsonl", rows)
    result = run("replay", trace, "--hardware", "h100-llama-3.1-8b", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert (shown["hardware"], shown["fit"], shown["pods"]) == ("h100-llama-3.1-8b", None, 4)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--fit", "--hardware", "generic-8b"), "exclude each other"),
        (("--ttft", "soon"), "'soon' is not a duration"),
        (("-c", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("--kv-tokens", "16"), "larger than a pod's KV cache"),
        (("--hardware", "abacus"), "is not one of"),
    ],
)
def test_an_error_is_reported_and_ends_with_2(recorded: Path, arguments: tuple[str, ...], reason: str) -> None:
    result = run("replay", recorded, *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr


@pytest.mark.parametrize(
    ("config", "plugin"),
    [("bursts.yaml", "burst-prefix-cache-producer"), ("endpoint-picker-precise.yaml", "tokenizer")],
)
def test_a_plugin_that_waits_is_reported_and_exits_with_2(recorded: Path, config: str, plugin: str) -> None:
    result = run("replay", recorded, "-c", CONFIG / config)
    assert result.exit_code == 2
    assert f"scheduling.plugins.{plugin}: may wait for its data, which a replay" in result.stderr


def test_an_invalid_line_is_reported_and_exits_with_2(tmp_path: Path) -> None:
    bad = written(tmp_path / "bad.jsonl", [head(), request(), request(duration=None)])
    for command in ("replay", "tune"):
        result = run(command, bad)
        assert result.exit_code == 2
        assert f"{bad}, line 3: duration is missing" in result.stderr


def test_a_record_without_pod_sizes_requires_a_pod_model(tmp_path: Path) -> None:
    few = written(tmp_path / "few.jsonl", [head(), request()])
    result = run("replay", few)
    assert (result.exit_code, "--hardware" in result.stderr) == (2, True)
    assert run("replay", few, "--hardware", "generic-8b").exit_code == 0


def test_tuning_writes_a_valid_patch(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({"scheduling": BAD}))
    patch = tmp_path / "patch.yaml"
    result = run(
        "tune",
        recorded,
        "-c",
        tmp_path / "bad.yaml",
        "--trials",
        "3",
        "-o",
        patch,
        "--pods",
        "3",
        "--hardware",
        "generic-8b",
    )
    assert result.exit_code == 0, result.output
    assert "instead of" in result.stdout
    assert "95 of 100" in patch.read_text()
    assert load(patch, {}).scheduling.plugins
    assert "weight of prefix-cache-scorer" in patch.read_text()


def test_a_pool_is_replayed_and_tuned_separately(recorded: Path, tmp_path: Path) -> None:
    lines = [orjson.loads(line) for line in recorded.read_bytes().splitlines()]
    both = written(tmp_path / "both.jsonl", [{**line, "pool": "large"} if "t" in line else line for line in lines])
    config, patch = tmp_path / "kvlane.yaml", tmp_path / "patch.yaml"
    config.write_text(yaml.safe_dump({"pools": {"large": {"scheduling": BAD}}}))
    about = (both, "-c", config, "--pods", "3", "--hardware", "generic-8b")
    assert "no request" in run("replay", *about).stderr
    assert run("replay", *about, "--pool", "large").stdout.startswith("both: 200 requests")
    assert "there is no pool 'huge'" in run("tune", *about, "--pool", "huge").stderr
    result = run("tune", *about, "--pool", "large", "--trials", "3", "-o", patch)
    assert result.exit_code == 0, result.output
    assert load(patch, {}).pools["large"].scheduling.plugins


def test_tuning_without_a_significant_gain_exits_with_1(recorded: Path, tmp_path: Path) -> None:
    patch = tmp_path / "patch.yaml"
    result = run("tune", recorded, "--trials", "1", "--pods", "1", "--load", "0.2", "-o", patch)
    assert result.exit_code == 1, result.output
    assert "No change is significant" in result.stderr
    assert not patch.exists()


def test_too_few_requests_are_reported(tmp_path: Path) -> None:
    few = written(tmp_path / "few.jsonl", [head(), *[request(float(at)) for at in range(30)]])
    result = run("tune", few, "--hardware", "generic-8b")
    assert (result.exit_code, "too few to tune on" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", ["replay", "tune"])
def test_help_shows_examples(command: str) -> None:
    text = run(command, "--help").stdout
    assert f"kvlane {command} /var/log/kvlane/record.jsonl" in text
    assert "Exit code" in text
