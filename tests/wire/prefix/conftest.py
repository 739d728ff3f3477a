"""ZeroMQ delivers from threads of its own, so these tests wait for real."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def skips_waits() -> None:
    """In place of the fixture of the same name for all of tests/wire."""
