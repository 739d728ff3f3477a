"""What docs/architecture.md tells readers to add works: each diff is applied to a copy of the package, and run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.docs.diffs import apply
from tests.helpers.docs.pages import ROOT

PAGE = ROOT / "docs" / "architecture.md"


def diff_of(heading: str) -> str:
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return section.partition("```diff\n")[2].partition("```")[0]


class Copy:
    """A copy of the package in which a diff of the page is applied."""

    def __init__(self, folder: Path, heading: str) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "proxy", folder / "proxy", ignore=shutil.ignore_patterns("__pycache__"))
        self.changed = apply(diff_of(heading), folder)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(self.folder), str(ROOT)))}
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self.folder, env=environ, input=stdin, capture_output=True, text=True)

    def kvlane(self, *arguments: str, stdin: str = "") -> str:
        ended = self.run("-m", "proxy", *arguments, stdin=stdin)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def checked(self, configuration: object) -> subprocess.CompletedProcess[str]:
        file = self.folder / "kvlane.yaml"
        file.write_text(yaml.safe_dump(configuration))
        return self.run("-m", "proxy", "check", "-c", str(file))


HEADINGS = [
    "Add a scorer",
    "Add a setting",
    "Add a metric",
    "Add a value that processes share",
    "Add an engine dialect",
]


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_diff_leaves_the_code_formatted_and_free_of_faults(heading: str, tmp_path: Path) -> None:
    files = [str(file) for file in Copy(tmp_path, heading).changed]
    for arguments in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--config", str(ROOT / "pyproject.toml"), *files]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout


def test_a_scorer_is_found_and_decides(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a scorer")
    assert "enough" in copy.kvlane("plugins", "cache-size-scorer")
    scorers = [{"type": "cache-size-scorer"}]
    profiles = [{"name": "default", "plugins": [{"pluginRef": "cache-size-scorer"}]}]
    situation = {
        "scheduling": {"plugins": scorers, "schedulingProfiles": profiles},
        "endpoints": [{"name": "pod-0"}],
    }
    body = json.loads(copy.kvlane("explain", "--state", "-", stdin=yaml.safe_dump(situation)))
    (scorer,) = body["profiles"]["default"]["scorers"]
    assert scorer == {"name": "cache-size-scorer", "weight": 1.0, "scores": {"pod-0": 0.0}}


def test_a_setting_is_checked_and_described(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a setting")
    assert "| `timedCalls` | integer | `64` | one call" in copy.kvlane("check", "--reference")
    wrong = copy.checked({"telemetry": {"timedCalls": 0}})
    assert wrong.returncode == 2
    assert "telemetry.timedCalls: " in wrong.stderr
    right = copy.checked({"telemetry": {"timedCalls": 7}})
    assert right.returncode == 0, right.stderr
    assert "timedCalls: 7" in right.stdout


def test_a_metric_is_listed_and_counts(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a metric")
    assert "kvlane_decisions_without_choice_total" in copy.kvlane("metrics")
    script = (
        "from proxy.core.endpoint import Endpoint\n"
        "from tests.helpers.telemetry.fakes import World\n"
        "world, pod = World(), Endpoint('pod-0')\n"
        "attempt = world.attempt_of(pod)\n"
        "for candidates in ((pod,), (pod, Endpoint('pod-1'))):\n"
        "    world.observer.decided(attempt.request, candidates, attempt.decision, 0.0)\n"
        "print(world.scrape()['kvlane_decisions_without_choice_total'])\n"
    )
    ended = copy.run("-c", script)
    assert ended.stdout.strip() == "{(): 1.0}", ended.stderr


def test_a_value_is_shared(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a value that processes share")
    script = (
        "from proxy.cluster.messages import SHARED, RecordKind\n"
        "from proxy.cluster.sharing import Replicated\n"
        "from proxy.settings import from_mapping\n"
        "apps = [Replicated(from_mapping({'replicas': {'store': 'redis://nowhere'}})) for _ in range(3)]\n"
        "first, second, late = [app.serving.data_port.gateway.failover.quarantine for app in apps]\n"
        "(shared,) = [each for each in apps[0]._replica.state.values if RecordKind.QUARANTINE in each.kinds]\n"
        "shared.publish = lambda kind, body: apps[1]._replica.state.receive(7, kind, body)\n"
        "first.quarantine(b'poison')\n"
        "first.on_quarantine(b'poison')\n"
        "for kind, body in shared.lasting(0.01):\n"
        "    apps[2]._replica.state.receive(7, kind, body)\n"
        "print([*second.entries, *late.entries], RecordKind.QUARANTINE in SHARED)\n"
    )
    ended = copy.run("-c", script)
    assert ended.stdout.strip() == "[b'poison', b'poison'] True", ended.stderr


def test_a_dialect_reads_the_metrics_of_its_engine(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add an engine dialect")
    checked = copy.checked({"pods": {"static": [{"url": "http://localhost:1", "engine": "lmdeploy"}]}})
    assert checked.returncode == 0, checked.stderr
    script = (
        "from proxy.fleet.dialects import Dialects\n"
        "from proxy.core.endpoint import Endpoint\n"
        "print('lmdeploy:num_requests_waiting' in Dialects().of(Endpoint('pod-0', engine='lmdeploy')).names)\n"
    )
    ended = copy.run("-c", script)
    assert ended.stdout.strip() == "True", ended.stderr
