"""A reload that fails, whatever the error is, leaves the configuration as it was and the next reload possible."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proxy.app import App
from proxy.config.load import ConfigReader
from proxy.settings import Settings, from_mapping


@dataclass(frozen=True, slots=True)
class Surprising(ConfigReader):
    """Raises each of `errors` in turn where the file would be read, then gives `good`."""

    errors: list[Exception] = field(default_factory=list)
    good: dict[str, Any] = field(default_factory=dict)

    def again(self) -> Settings:
        if self.errors:
            raise self.errors.pop()
        return from_mapping(self.good)


async def test_an_unexpected_error_refuses_the_reload_and_the_next_one_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ports = {"listen": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}}
    good = {**ports, "reliability": {"retries": {"attempts": 5}}}
    reader = Surprising(errors=[KeyError("template"), RecursionError()], good=good)
    async with App(from_mapping(ports), reader=reader) as app:
        for _ in range(2):
            await app.configurations.read_again("SIGHUP")
            assert app.configurations.described()["number"] == 1
        await app.configurations.read_again("SIGHUP")
        assert app.configurations.described()["number"] == 2
    assert caplog.text.count("not reloaded: an unexpected error; the configuration stays as it was") == 2


async def test_the_log_names_the_file_of_a_refused_reload_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "kvlane.yaml"
    ports = {"listen": {"host": "127.0.0.1", "port": 0}, "admin": {"port": 0}}
    async with App(from_mapping(ports), reader=ConfigReader(file)) as app:
        for text in ("podz: {}", "listen: ["):
            file.write_text(text)
            await app.configurations.read_again("SIGHUP")
    first, second = (record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
    assert first == f"not reloaded: {file}: unknown field 'podz'; did you mean 'pods'?"
    assert second.startswith(f"not reloaded: {file}:1:10: ")
