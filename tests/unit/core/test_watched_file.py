from __future__ import annotations

from pathlib import Path

import pytest

from proxy.core.errors import ConfigError, Problem, Unreadable
from proxy.core.watched_file import WatchedFile


def test_a_file_that_cannot_be_read_for_a_while_is_read_afterwards_without_a_change(tmp_path: Path) -> None:
    """As when descriptors run out, or the mode of the file is wrong at first."""
    path = tmp_path / "file"
    path.write_text("content")
    file = WatchedFile(path)
    is_readable = False

    def load() -> str:
        if not is_readable:
            raise Unreadable([Problem(str(path), "cannot be read")])
        return path.read_text()

    for _ in range(2):
        with pytest.raises(Unreadable):
            file.read_if_changed(load)
    is_readable = True
    assert file.read_if_changed(load) == "content"
    assert file.read_if_changed(load) is None


def test_a_file_with_faults_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("faults")
    file = WatchedFile(path)

    def load() -> str:
        raise ConfigError([Problem(str(path), "is broken")])

    with pytest.raises(ConfigError):
        file.read_if_changed(load)
    assert file.read_if_changed(load) is None
