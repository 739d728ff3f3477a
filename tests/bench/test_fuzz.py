"""The corpus of the fuzzer, and a few hundred inputs made of it, are taken without a crash, a hang or an exception."""

from __future__ import annotations

import asyncio

import pytest

from bench.fuzz import TARGETS, Faults, fuzz
from tests.patience import PatientLoop


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_comes_in_breaks_anything(name: str) -> None:
    with asyncio.Runner(loop_factory=PatientLoop) as runner:
        tried, failed = runner.run(fuzz(name, seconds=3600, seed=1, most=120))
    assert tried == 120
    assert failed == []


def test_what_is_looked_for_would_be_found() -> None:
    import logging

    faults = Faults()
    log = logging.getLogger("some.room")
    log.addHandler(faults)
    try:
        log.warning("this is none")
        assert faults.take() == ""
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            log.exception("this is one")
        assert "boom" in faults.take()
    finally:
        log.removeHandler(faults)
