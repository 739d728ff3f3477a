"""A `kvlane serve` whose standard output and standard error are pipes that no process reads."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.helpers.cli.kvlane import ask, kvlane, until_ready
from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE, wait_until

REQUESTS = 3000
"""Each leaves a line in the log or in the access log, above 100 bytes: several times what a pipe holds."""


@pytest.fixture(scope="module")
def pod() -> Iterator[str]:
    port = free_port()
    with kvlane("sim", "--port", str(port)) as sim:
        until_ready(f"http://127.0.0.1:{port}/health", sim)
        yield f"http://127.0.0.1:{port}"


def statuses(url: str, method: str, path: str) -> set[int]:
    """Of many requests, one after the other."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    seen = set()
    for _ in range(REQUESTS):
        connection.request(method, path)
        reply = connection.getresponse()
        reply.read()
        seen.add(reply.status)
    connection.close()
    return seen


@pytest.mark.parametrize("workers", [1, 2])
def test_unread_logs_delay_neither_requests_nor_the_exit(pod: str, tmp_path: Path, workers: int) -> None:
    data, admin = free_port(), free_port()
    file = tmp_path / "kvlane.yaml"
    given = {
        "listen": {"host": "127.0.0.1", "port": data},
        "admin": {"port": admin},
        "pods": {"static": [{"url": pod}]},
        "reliability": {"drain": {"settle": 0.1}},
    }
    file.write_text(yaml.safe_dump(given))
    with kvlane("serve", "-c", str(file), "--workers", str(workers)) as process:
        until_ready(f"http://127.0.0.1:{data}/health", process)
        assert statuses(f"http://127.0.0.1:{admin}", "POST", "/nowhere") == {404}  # an audit line each
        assert statuses(f"http://127.0.0.1:{data}", "GET", "/v1/models") == {200}  # an access log line each
        assert ask(f"http://127.0.0.1:{admin}/metrics")[0] == 200
        process.signal(signal.SIGTERM)
        wait_until(lambda: not process.running)
        assert process.ended() == 0
    assert "POST /nowhere by 'anybody'" in process.errors
    assert "Traceback" not in process.errors


@pytest.mark.parametrize("module", ["proxy.parsing", "proxy.prefix.tokenizer"])
def test_a_crashing_parser_process_ends_even_if_standard_error_is_full(module: str) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=writing) as process:
        try:
            process.communicate(b"\x04" + bytes(7) + b"junk", timeout=PATIENCE)
        finally:
            process.kill()
            os.close(reading)
            os.close(writing)
    assert process.returncode == 1
