"""Standard error whose reader stands still."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from proxy.telemetry import lines
from proxy.telemetry.lines import StandardError
from proxy.telemetry.logs import set_up
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Exposition
from proxy.telemetry.settings import Telemetry
from tests.helpers.telemetry.fakes import World
from tests.helpers.waiting import wait_until

LINE = "x" * 99 + "\n"
FULL = 2 * 65536
"""Bytes that are more than a pipe takes."""


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        os.close(descriptor)


def read_until(descriptor: int, enough: Callable[[bytes], object]) -> bytes:
    os.set_blocking(descriptor, False)
    found = b""

    def is_enough() -> object:
        nonlocal found
        with suppress(BlockingIOError):
            found += os.read(descriptor, 65536)
        return enough(found)

    wait_until(is_enough)
    return found


def test_lines_are_written_in_order() -> None:
    with pipe() as (reading, writing):
        stream = StandardError(writing)
        for number in range(3):
            print(f"{number} caf\udce9", file=stream)
        assert stream.stop()
        assert os.read(reading, 1000) == b"0 caf\\udce9\n1 caf\\udce9\n2 caf\\udce9\n"
        assert stream.lost_lines == 0


def test_a_full_pipe_blocks_no_writer_and_dropped_lines_are_counted_and_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "BACKLOG", 10_000)
    with pipe() as (reading, writing):
        stream = StandardError(writing)
        set_up(Telemetry(), stream)
        while not stream.lost_lines:
            stream.write(LINE)  # as fast as can be, more than the pipe and the backlog take
        for _ in range(5):
            stream.write(LINE)
        lost = stream.lost_lines
        assert lost >= 6
        report = f"standard error was not read fast enough: dropped {lost} lines".encode()
        read_until(reading, lambda text: report in text)
        stream.write("again\n")
        assert b"dropped" not in read_until(reading, lambda text: b"again" in text)
        assert stream.lost_lines == lost
        assert stream.stop()


def test_a_reader_that_never_reads_does_not_block_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "STOP_TIMEOUT", 0.02)
    with pipe() as (reading, writing):
        stream = StandardError(writing)
        stream.write("x" * FULL)
        assert not stream.stop()
        read_until(reading, lambda text: len(text) == FULL)
        wait_until(stream.stop)


def test_a_closed_reader_costs_only_lines() -> None:
    with pipe() as (reading, writing):
        os.dup2(os.open(os.devnull, os.O_RDONLY), reading)
        stream = StandardError(writing)
        for _ in range(3):
            stream.write(LINE)
        assert stream.stop()
        assert stream.lost_lines == 3


async def test_dropped_lines_are_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    with pipe() as (_, writing):
        stream = StandardError(writing)
        stream.lost_lines = 7
        monkeypatch.setattr(sys, "stderr", stream)
        assert lines.lost_lines() == 7
        world = World()
        body, _ = await Exposition(world.catalogue, world.series).render("")
        assert b"\nkvlane_log_lines_lost_total 7.0\n" in body
        assert stream.stop()
    assert Catalogue("test").log_lines_lost.cell().value == 0
