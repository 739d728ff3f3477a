from __future__ import annotations

import io
import json
import logging

import pytest

from proxy.core import params
from proxy.core.errors import ConfigError
from proxy.telemetry.logs import set_up
from proxy.telemetry.settings import LogFormat, LogLevel, Telemetry


def test_a_text_line_has_time_level_and_logger() -> None:
    stream = io.StringIO()
    set_up(Telemetry(), stream)
    logging.getLogger("proxy.fleet").warning("pod %s is late", "a")
    assert stream.getvalue().endswith("WARNING proxy.fleet: pod a is late\n")


def test_text_of_a_pod_neither_controls_a_terminal_nor_forges_a_line() -> None:
    stream = io.StringIO()
    set_up(Telemetry(), stream)
    logging.getLogger("proxy.fleet").warning("pod %s", "a\x1b]0;b\x07\r\x9bc\td\n2026-01-01 ERROR proxy: forged")
    assert stream.getvalue().partition("pod ")[2] == "a\\x1b]0;b\\x07\\x0d\\x9bc\td\n  2026-01-01 ERROR proxy: forged\n"


def test_a_json_record_is_one_object_per_line() -> None:
    stream = io.StringIO()
    set_up(Telemetry(log_format=LogFormat.JSON), stream)
    try:
        raise RuntimeError("two\nlines")
    except RuntimeError:
        logging.getLogger("proxy.fleet").exception("pod %s", "caf\udce9")
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("error", "proxy.fleet", "pod caf\\udce9")
    assert record["time"].endswith("Z")
    assert "RuntimeError: two\nlines" in record["exception"]


def test_records_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    set_up(Telemetry(log_level=LogLevel.WARNING), stream)
    logging.getLogger("proxy").info("quiet")
    assert stream.getvalue() == ""


def test_setting_up_twice_writes_once() -> None:
    stream = io.StringIO()
    set_up(Telemetry(), stream)
    set_up(Telemetry(), stream)
    logging.getLogger("proxy").info("once")
    assert stream.getvalue().count("once") == 1


def test_the_section_is_read_case_insensitively() -> None:
    loaded = params.load(Telemetry, {"logLevel": "Debug", "logFormat": "JSON", "accessLog": False})
    assert loaded == Telemetry(LogLevel.DEBUG, LogFormat.JSON, False)


def test_a_level_that_does_not_exist_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'warning'"):
        params.load(Telemetry, {"logLevel": "warn1ng"})
