from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from proxy.core.errors import BadRequest
from proxy.telemetry.logs import AUDIT, ROOT, LogLevels, set_up
from proxy.telemetry.settings import LogFormat, LogLevel, Telemetry

LOGGER, BELOW = "proxy.fleet", "proxy.fleet.store"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Given back as they were found."""
    root = logging.getLogger()
    handlers, levels = (
        root.handlers[:],
        {one: one.level for one in map(logging.getLogger, (None, LOGGER, BELOW, AUDIT))},
    )
    logging.getLogger(BELOW)
    yield
    root.handlers[:] = handlers
    for one, level in levels.items():
        one.setLevel(level)


def levels_of() -> LogLevels:
    return LogLevels(lambda: LogLevel.WARNING)


def test_a_logger_and_the_loggers_below_it_log_more_until_the_level_is_reset() -> None:
    stream, levels = io.StringIO(), levels_of()
    set_up(Telemetry(log_level=LogLevel.WARNING), stream)
    levels.change({LOGGER: "debug"})
    logging.getLogger(BELOW).debug("heard")
    logging.getLogger("proxy.gateway").info("not heard")
    levels.change({LOGGER: None})
    logging.getLogger(BELOW).info("not heard either")
    assert stream.getvalue().splitlines()[0].endswith("heard")
    assert stream.getvalue().count("\n") == 1


def test_configured_levels_and_the_roots_are_listed() -> None:
    set_up(Telemetry(log_level=LogLevel.WARNING), io.StringIO())
    levels = levels_of()
    assert levels.shown()["levels"] == {ROOT: "warning"}
    levels.change({LOGGER: "DEBUG", ROOT: "error"})
    assert levels.shown()["levels"] == {ROOT: "error", LOGGER: "debug"}
    levels.change({ROOT: None})
    assert levels.shown()["levels"] == {ROOT: "warning", LOGGER: "debug"}
    assert {LOGGER, BELOW} <= set(levels.shown()["rooms"])


@pytest.mark.parametrize(
    ("wanted", "result"),
    [
        ({"proxy.flet": "debug"}, "did you mean 'proxy.fleet'"),
        ({LOGGER: "loud"}, "'loud' is not a log level; use one of debug, info, warning, error"),
        ({LOGGER: "debug", "nowhere.at.all.xyz": "debug"}, "There is no logger"),
        ({AUDIT: "error"}, "There is no logger"),
        ([LOGGER], "Send loggers with their levels"),
        ({}, "Send loggers with their levels"),
    ],
    ids=str,
)
def test_an_invalid_change_changes_nothing(wanted: object, result: str) -> None:
    before = logging.getLogger(LOGGER).level
    with pytest.raises(BadRequest) as refused:
        levels_of().change(wanted)
    assert result in str(refused.value)
    assert logging.getLogger(LOGGER).level == before


def test_other_processes_apply_published_levels_and_nothing_else_stays() -> None:
    received: list[bytes] = []
    here, there = LogLevels(lambda: LogLevel.INFO, received.append), levels_of()
    there.change({"proxy.fleet.store": "debug"})
    here.change({LOGGER: "error"})
    there.apply(received[-1])
    assert there.shown()["levels"].keys() == {ROOT, LOGGER}
    assert logging.getLogger(BELOW).level == logging.NOTSET


def test_a_record_of_a_request_has_its_id_in_json() -> None:
    stream = io.StringIO()
    set_up(Telemetry(log_format=LogFormat.JSON), stream)
    logging.getLogger(LOGGER).warning("request %s: %s failed", "abc", "it")
    logging.getLogger(LOGGER).warning("pod %s is late", "a")
    of_a_request, other = map(json.loads, stream.getvalue().splitlines())
    assert of_a_request["request_id"] == "abc"
    assert of_a_request["message"] == "request abc: it failed"
    assert "request_id" not in other
