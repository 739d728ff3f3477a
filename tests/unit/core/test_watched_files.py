from __future__ import annotations

from pathlib import Path

import pytest

from proxy.core.errors import ConfigError, Problem, Unreadable
from proxy.core.files import WatchedFiles


def test_a_file_that_cannot_be_read_for_a_while_is_read_afterwards_without_a_change(tmp_path: Path) -> None:
    """As when descriptors run out, or the mode of the file is wrong at first."""
    path = tmp_path / "file"
    path.write_text("content")
    file = WatchedFiles([path])
    is_readable = False

    def load() -> str:
        if not is_readable:
            raise Unreadable([Problem(str(path), "cannot be read")])
        return path.read_text()

    with pytest.raises(Unreadable):
        file.read_if_changed(load)
    assert file.read_if_changed(load) is None
    is_readable = True
    assert file.read_if_changed(load) == "content"
    assert file.read_if_changed(load) is None


def test_a_file_with_faults_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("faults")
    file = WatchedFiles([path])

    def load() -> str:
        raise ConfigError([Problem(str(path), "is broken")])

    with pytest.raises(ConfigError):
        file.read_if_changed(load)
    assert file.read_if_changed(load) is None


def test_the_same_reason_is_raised_again_after_the_file_was_read_or_had_another_fault(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file, raised = WatchedFiles([path]), [Unreadable([Problem("a", "b")])]

    def load() -> str:
        raise raised[0]

    for error in (raised[0], Unreadable([Problem("a", "c")]), raised[0]):
        raised[0] = error
        with pytest.raises(Unreadable):
            file.read_if_changed(load)
        assert file.read_if_changed(load) is None
    path.write_text("content")
    assert file.read_if_changed(load) is None
    assert file.read_if_changed(path.read_text) == "content"
    path.unlink()
    file.read_if_changed(load)
    with pytest.raises(Unreadable):
        file.read_if_changed(load)


def test_a_change_counts_after_two_equal_reads(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.write_text("one")
    files = WatchedFiles(paths)
    assert files.read(lambda: 1) == 1
    paths[1].write_text("three")
    assert [files.read_if_changed(lambda: 2) for _ in range(3)] == [None, 2, None]


def test_without_settling_a_change_counts_at_once_and_a_missing_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    files = WatchedFiles([path], waits_for_writer=False)
    assert files.read(lambda: 1) == 1
    path.unlink()
    assert files.read_if_changed(lambda: 2) is None
    path.write_text("three")
    assert [files.read_if_changed(lambda: 3) for _ in range(2)] == [3, None]
