"""The corpus of the fuzzer, and a few hundred inputs made of it, are taken without a crash, a hang or an exception."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from bench import fuzz as fuzzer
from bench.fuzz import TARGETS, Faults, fuzz
from bench.fuzzing.inputs import LATE
from tests.helpers.patience import PatientLoop


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_anything(name: str) -> None:
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        found = runner.run(fuzz(name, seconds=3600, seed=1, most=250))
    assert found.tried == 250
    assert found.failed == []


@pytest.mark.parametrize("late", ["raises", "returns"])
@pytest.mark.parametrize("times", [1, 2, 3, 10])
async def test_a_time_out_is_reported_if_it_repeats_when_the_input_is_run_alone(
    late: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "PAUSE", 0.0)
    inputs = list[bytes]()

    async def check(data: bytes, rng: random.Random) -> str:
        inputs.append(data)
        if len(inputs) > times:
            return ""
        if late == "raises":
            raise TimeoutError
        return f"{LATE}the gateway was left waiting"

    assert bool(await fuzzer.tried(check, b"x")) is (times > fuzzer.ALONE)
    assert len(inputs) == min(times, fuzzer.ALONE) + 1


async def test_what_is_no_time_out_is_reported_at_once() -> None:
    found = ["a stream ended", ""]

    async def check(data: bytes, rng: random.Random) -> str:
        return found.pop(0)

    assert await fuzzer.tried(check, b"x") == "a stream ended"


def test_exceptions_in_the_log_are_found() -> None:
    faults = Faults()
    log = logging.getLogger("some.package")
    log.addHandler(faults)
    try:
        log.warning("a warning is not a fault")
        assert faults.collect() == ""
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.exception("an exception is one")
        assert "boom" in faults.collect()
    finally:
        log.removeHandler(faults)
