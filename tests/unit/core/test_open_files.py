"""The limit on open files, of the process and of the machine."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from proxy.core import files
from proxy.core.errors import OutOfFiles
from proxy.core.files import open_files_limit
from proxy.core.log_limit import LogLimit
from proxy.http.upstream.pool import not_connected


@pytest.fixture(autouse=True)
def _logs_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_logs", LogLimit())


def test_the_limit_of_the_process_is_reported_with_its_value(caplog: pytest.LogCaptureFixture) -> None:
    error = not_connected(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert isinstance(error, OutOfFiles)
    for text in (str(error), caplog.text):
        assert f"the limit on open files is {open_files_limit()}" in text
    assert "LimitNOFILE" in caplog.text


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "found-out"])
def test_the_limit_of_the_machine_is_not_reported_as_that_of_the_process(
    is_named: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: OSError = OSError(errno.ENFILE, os.strerror(errno.ENFILE))
    if not is_named:

        def full(*_: object) -> int:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

        monkeypatch.setattr(os, "open", full)
        raised = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    error = not_connected(raised)
    assert isinstance(error, OutOfFiles)
    for text in (str(error), caplog.text):
        assert "the machine" in text
        assert str(open_files_limit()) not in text
    assert "fs.file-max" in caplog.text
    assert "LimitNOFILE" not in caplog.text


def test_another_error_of_a_connection_is_not_the_limit() -> None:
    assert not isinstance(not_connected(OSError(errno.EHOSTUNREACH, "No route to host")), OutOfFiles)
