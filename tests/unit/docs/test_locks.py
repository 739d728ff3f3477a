"""What is installed is what was looked at: every package of the locks is named with its version and its hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_every_package_of_a_lock_has_its_version_and_hashes(name: str) -> None:
    packages = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
    assert len(packages) > 10
    for package in packages:
        assert re.match(r"[\w.\[\]-]+==[\w.]+ ", package), package
        assert "--hash=sha256:" in package, package
