"""How `kvlane serve` stops: load balancers notice first, streams finish, and a second signal ends it at once."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse, IncompleteRead
from pathlib import Path

import pytest
import yaml

from tests.helpers.cli.kvlane import Kvlane, ask, kvlane, until_ready
from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE, wait_until

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
LONG = 600.0
"""The seconds in which a test polls readiness as load balancers do."""
SETTLE, BRIEF = 1.0, 0.2

WORKERS = pytest.mark.parametrize("workers", [1, 2])


@dataclass(frozen=True)
class Serving:
    process: Kvlane
    url: str
    admin: str

    def stream(self, tokens: int) -> HTTPResponse:
        body = json.dumps({**CHAT, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
        headers = {"content-type": "application/json"}
        reply: HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(self.url + "/v1/chat/completions", body, headers), timeout=PATIENCE
        )
        assert reply.readline().startswith(b"data: ")
        return reply

    def until_health_is(self, status: int) -> None:
        wait_until(lambda: ask(self.url + "/health")[0] == status)


@pytest.fixture(scope="module")
def pod() -> Iterator[str]:
    port = free_port()
    with kvlane("sim", "--port", str(port), "--time-scale", "2") as sim:
        until_ready(f"http://127.0.0.1:{port}/health", sim)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(pod: str, folder: Path, workers: int, settle: float = BRIEF) -> Iterator[Serving]:
    data, admin = free_port(), free_port()
    file = folder / "kvlane.yaml"
    given = {
        "listen": {"host": "127.0.0.1", "port": data},
        "admin": {"port": admin},
        "pods": {"static": [{"url": pod}]},
        "reliability": {"drain": {"settle": settle, "grace": 20}},
    }
    file.write_text(yaml.safe_dump(given))
    with kvlane("serve", "-c", str(file), "--workers", str(workers)) as process:
        it = Serving(process, f"http://127.0.0.1:{data}", f"http://127.0.0.1:{admin}")
        until_ready(it.admin + "/readyz", process)
        yield it


@WORKERS
def test_health_is_503_after_sigterm_while_new_requests_are_still_served(
    pod: str, tmp_path: Path, workers: int
) -> None:
    with serving(pod, tmp_path, workers, LONG) as it:
        until_ready(it.url + "/health", it.process)
        it.process.signal(signal.SIGTERM)
        it.until_health_is(503)
        status, body = ask(it.url + "/health")
        assert (status, json.loads(body)["error"]["code"]) == (503, "shutting_down")
        assert ask(it.admin + "/readyz")[0] == 503
        assert [ask(it.url + "/v1/chat/completions", CHAT)[0] for _ in range(20)] == [200] * 20
        assert it.process.running


@WORKERS
def test_new_requests_are_served_for_the_settle_time_only(pod: str, tmp_path: Path, workers: int) -> None:
    with serving(pod, tmp_path, workers, SETTLE) as it:
        until_ready(it.url + "/health", it.process)
        stopped_at = time.monotonic()
        it.process.signal(signal.SIGTERM)
        it.until_health_is(0)
        assert time.monotonic() - stopped_at > SETTLE * 0.9
        assert it.process.ended() == 0
        assert "Traceback" not in it.process.errors


@WORKERS
def test_a_running_stream_is_finished_before_the_end(pod: str, tmp_path: Path, workers: int) -> None:
    with serving(pod, tmp_path, workers) as it:
        with it.stream(400) as reply:
            it.process.signal(signal.SIGTERM)
            it.until_health_is(0)
            assert reply.read().endswith(b"data: [DONE]\n\n")
        assert it.process.ended() == 0
        assert "have up to 20 s to end (reliability.drain.grace); a second SIGTERM ends them" in it.process.errors
        assert workers > 1 or "running requests (now 1)" in it.process.errors
        assert "kvlane: stopped\n" in it.process.errors
        assert "Traceback" not in it.process.errors


@pytest.mark.smoke
def test_ctrl_c_skips_the_settle_time(pod: str, tmp_path: Path) -> None:
    with serving(pod, tmp_path, 1, settle=600.0) as it, it.stream(100_000):
        it.process.signal(signal.SIGINT)
        it.until_health_is(0)


@WORKERS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_of_a_kind_ends_at_once(
    pod: str, tmp_path: Path, workers: int, number: signal.Signals
) -> None:
    other = signal.SIGINT if number is signal.SIGTERM else signal.SIGTERM
    with serving(pod, tmp_path, workers) as it, it.stream(100_000) as reply:
        it.process.signal(number)
        it.until_health_is(0)
        it.process.signal(other)
        assert all(reply.readline() for _ in range(20))
        it.process.signal(number)
        assert it.process.ended() == -number
        assert f"stopped at once by a second {number.name}; requests cut: 1" in it.process.errors
        with pytest.raises((IncompleteRead, ConnectionError)):
            reply.read()
