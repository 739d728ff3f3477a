from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from proxy.core.errors import BadRequest
from proxy.telemetry.logs import AUDIT, ROOT, LogLevels, set_up
from proxy.telemetry.settings import LogFormat, LogLevel, Telemetry

ROOM, BELOW = "proxy.fleet", "proxy.fleet.store"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Given back as they were found."""
    root = logging.getLogger()
    handlers, levels = root.handlers[:], {one: one.level for one in map(logging.getLogger, (None, ROOM, BELOW, AUDIT))}
    logging.getLogger(BELOW)
    yield
    root.handlers[:] = handlers
    for one, level in levels.items():
        one.setLevel(level)


def levels_of() -> LogLevels:
    return LogLevels(lambda: LogLevel.WARNING)


def test_a_room_says_more_and_so_do_those_below_it_until_its_level_is_taken_back() -> None:
    stream, levels = io.StringIO(), levels_of()
    set_up(Telemetry(log_level=LogLevel.WARNING), stream)
    levels.change({ROOM: "debug"})
    logging.getLogger(BELOW).debug("heard")
    logging.getLogger("proxy.gateway").info("not heard")
    levels.change({ROOM: None})
    logging.getLogger(BELOW).info("not heard either")
    assert stream.getvalue().splitlines()[0].endswith("heard")
    assert stream.getvalue().count("\n") == 1


def test_what_is_shown_are_levels_that_were_given_and_the_root_s() -> None:
    set_up(Telemetry(log_level=LogLevel.WARNING), io.StringIO())
    levels = levels_of()
    assert levels.shown()["levels"] == {ROOT: "warning"}
    levels.change({ROOM: "DEBUG", ROOT: "error"})
    assert levels.shown()["levels"] == {ROOT: "error", ROOM: "debug"}
    levels.change({ROOT: None})
    assert levels.shown()["levels"] == {ROOT: "warning", ROOM: "debug"}
    assert {ROOM, BELOW} <= set(levels.shown()["rooms"])


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"proxy.flet": "debug"}, "did you mean 'proxy.fleet'"),
        ({ROOM: "loud"}, "'loud' is not a log level; use one of debug, info, warning, error"),
        ({ROOM: "debug", "nowhere.at.all.xyz": "debug"}, "There is no logger"),
        ({AUDIT: "error"}, "There is no logger"),
        ([ROOM], "Send loggers with their levels"),
        ({}, "Send loggers with their levels"),
    ],
    ids=str,
)
def test_what_cannot_be_done_changes_nothing(wanted: object, said: str) -> None:
    before = logging.getLogger(ROOM).level
    with pytest.raises(BadRequest) as refused:
        levels_of().change(wanted)
    assert said in str(refused.value)
    assert logging.getLogger(ROOM).level == before


def test_others_take_what_they_are_told_and_nothing_else_stays() -> None:
    told: list[bytes] = []
    here, there = LogLevels(lambda: LogLevel.INFO, told.append), levels_of()
    there.change({"proxy.fleet.store": "debug"})
    here.change({ROOM: "error"})
    there.apply(told[-1])
    assert there.shown()["levels"].keys() == {ROOT, ROOM}
    assert logging.getLogger(BELOW).level == logging.NOTSET


def test_a_record_of_a_request_has_its_id_for_collectors() -> None:
    stream = io.StringIO()
    set_up(Telemetry(log_format=LogFormat.JSON), stream)
    logging.getLogger(ROOM).warning("request %s: %s failed", "abc", "it")
    logging.getLogger(ROOM).warning("pod %s is late", "a")
    of_a_request, other = map(json.loads, stream.getvalue().splitlines())
    assert of_a_request["request_id"] == "abc"
    assert of_a_request["message"] == "request abc: it failed"
    assert "request_id" not in other
