"""The corpus of the fuzzer, and a few hundred inputs made of it, are taken without a crash, a hang or an exception."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bench.fuzz import TARGETS, Faults, fuzz
from tests.helpers.patience import PatientLoop


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_comes_in_breaks_anything(name: str) -> None:
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        found = runner.run(fuzz(name, seconds=3600, seed=1, most=250))
    assert found.tried == 250
    assert found.failed == []


def test_exceptions_in_the_log_are_found() -> None:
    faults = Faults()
    log = logging.getLogger("some.package")
    log.addHandler(faults)
    try:
        log.warning("a warning is not a fault")
        assert faults.take() == ""
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.exception("an exception is one")
        assert "boom" in faults.take()
    finally:
        log.removeHandler(faults)
