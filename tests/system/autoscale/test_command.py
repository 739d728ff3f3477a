"""The actuator that runs a program."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from proxy.autoscale.actuators import Command, Compose
from proxy.autoscale.loop import ScalingOutcome
from tests.helpers.autoscale.orders import order

RECORD = """
import json, os, sys
result = {"argv": sys.argv[2:], "stdin": json.load(sys.stdin) if "stdin" in sys.argv[1] else None}
result["environment"] = {key: value for key, value in os.environ.items() if key.startswith("AUTOSCALE_")}
open(sys.argv[1], "w").write(json.dumps(result))
"""


async def test_a_program_receives_the_order_in_three_ways(tmp_path: Path) -> None:
    file = tmp_path / "stdin.json"
    argv = [sys.executable, "-c", RECORD, str(file), "{role}={desired}", "{current}", "{victims}", "$HOME; true"]
    assert await Command(argv, 10.0).scale(order(2, 4, ("d-3", "d-2"))) is ScalingOutcome.OK
    result = json.loads(file.read_text())
    assert result["argv"] == ["decode=2", "4", "d-3,d-2", "$HOME; true"]
    assert result["environment"] == {
        "AUTOSCALE_POOL": "default",
        "AUTOSCALE_ROLE": "decode",
        "AUTOSCALE_DESIRED": "2",
        "AUTOSCALE_CURRENT": "4",
        "AUTOSCALE_VICTIMS": "d-3,d-2",
    }
    assert result["stdin"]["decision_id"] == 7
    assert result["stdin"]["order"] == {"role": "decode", "current": 4, "desired": 2, "victims": ["d-3", "d-2"]}


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, ScalingOutcome.OK), (75, ScalingOutcome.BUSY), (1, ScalingOutcome.ERROR)]
)
async def test_the_exit_code_gives_the_result(code: int, outcome: ScalingOutcome) -> None:
    assert await Command([sys.executable, "-c", f"raise SystemExit({code})"], 10.0).scale(order(4)) is outcome


async def test_a_command_that_exceeds_its_timeout_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "late"
    program = f"import time; time.sleep(600); open({str(file)!r}, 'w')"  # who is not killed is waited for
    with pytest.raises(TimeoutError):
        await Command([sys.executable, "-c", program], 0.1).scale(order(4))
    assert not file.exists()


async def test_a_missing_command_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await Command(["/nowhere/scale"], 1.0).scale(order(4))


async def test_compose_receives_the_number_of_containers(tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    compose = Compose({"decode": "vllm-d"}, 10.0, "gpu", "/srv", program=(sys.executable, "-c", RECORD, str(file)))
    assert await compose.scale(order(5)) is ScalingOutcome.OK
    assert json.loads(file.read_text())["argv"] == [
        *("-p", "gpu", "--project-directory", "/srv", "up", "-d", "--no-recreate", "--no-deps"),
        *("--scale", "vllm-d=5", "vllm-d"),
    ]
