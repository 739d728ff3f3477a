from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.telemetry.lines import RotatingFile


def file(path: Path, max_size: int = 1_000_000, keep: int = 2) -> RotatingFile:
    return RotatingFile(path, path.with_name("lock"), max_size, keep, lambda lines: b"head\n")


@contextmanager
def space_for(size: int) -> Iterator[None]:
    """Files may not be larger meanwhile, as on a disk that is full: what fits is written, and then nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.touch(mode=0o644)
    file(path).write(b"one\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_new_file_starts_with_its_head_and_an_old_one_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file(path).write(b"one\n")
    file(path).write(b"two\n")
    assert path.read_bytes() == b"head\none\ntwo\n"


def test_a_full_file_is_rotated_and_the_oldest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = file(path, max_size=12)
    for line in (b"one\n", b"two\n", b"three\n", b"four\n"):
        writer.write(line)
    assert path.read_bytes() == b"head\nfour\n"
    assert (tmp_path / "r.jsonl.1").read_bytes() == b"head\nthree\n"
    assert (tmp_path / "r.jsonl.2").read_bytes() == b"head\ntwo\n"
    assert not (tmp_path / "r.jsonl.3").exists()


def test_with_nothing_to_keep_a_full_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = file(path, max_size=12, keep=0)
    writer.write(b"one\n")
    writer.write(b"three\n")
    assert path.read_bytes() == b"head\nthree\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["lock", "r.jsonl"]


def test_several_writers_share_a_file_and_rotate_it_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first, second = file(path, max_size=14), file(path, max_size=14)
    first.write(b"one\n")
    second.write(b"two\n")
    first.write(b"three\n")
    second.write(b"4\n")
    assert (tmp_path / "r.jsonl.1").read_bytes() == b"head\none\ntwo\n"
    assert path.read_bytes() == b"head\nthree\n4\n"


def test_a_file_that_was_moved_away_is_created_again(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = file(path)
    writer.write(b"one\n")
    path.rename(tmp_path / "elsewhere")
    writer.write(b"two\n")
    assert path.read_bytes() == b"head\ntwo\n"


def test_on_a_full_disk_lines_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = file(path)
    writer.write(b"one\n")
    with space_for(11), pytest.raises(OSError):
        writer.write(b"a longer line\n")
    assert path.read_bytes() == b"head\none\n"
    writer.write(b"two\n")
    assert path.read_bytes() == b"head\none\ntwo\n"


def test_an_unfinished_line_of_a_dead_process_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'head\n{"t":1,"mo')
    file(path).write(b"two\n")
    assert path.read_bytes() == b'head\n{"t":1,"mo\ntwo\n'
