"""The budget of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.budget import EXCEPTIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_names_existing_tests(name: str) -> None:
    file, _, test = name.partition("::")
    path = ROOT / file
    assert path.exists()
    assert all(part in path.read_text() for part in test.split("::") if part)
