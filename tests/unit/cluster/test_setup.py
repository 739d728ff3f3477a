"""What a worker is given when it starts."""

from __future__ import annotations

import datetime
import math
from typing import Any

from proxy.cluster.workers import Setup, packed_settings, read_settings
from proxy.core.params import FromEnvironment


def test_a_worker_receives_its_setup() -> None:
    setup = Setup('{"listen": {"port": 0}}', 3, "0102030405", 1, 2, [7, 8], [9])
    assert Setup.read(setup.packed()) == setup


def test_values_that_json_lacks_survive() -> None:
    given: Any = {"a": [1, 2.5, None, True, "x"], "b": {"inf": math.inf, "env": FromEnvironment("8000")}}
    packed = read_settings(packed_settings(given))
    assert packed == given
    assert isinstance(packed["b"]["env"], FromEnvironment)
    assert type(packed["a"][4]) is str


def test_keys_and_dates_become_texts() -> None:
    given: Any = {1: datetime.date(2030, 2, 3), False: "x"}
    assert read_settings(packed_settings(given)) == {"1": "2030-02-03", "False": "x"}
