"""Fixtures for the tests of HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.http.authority import self_signed


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a self-signed certificate of 127.0.0.1 and its key."""
    return self_signed(tmp_path / "pod.pem")
