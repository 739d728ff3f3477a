"""Ejection of an engine that hangs behind a server whose health check succeeds."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.fleet import MODEL, Fleet, proxy, wait_until

pytestmark = pytest.mark.vllm

STALL = 3.0


def body_of(number: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": f"Hello {number}", "max_tokens": 2, "ignore_eos": True}


def test_a_frozen_engine_is_ejected_and_returns(fleet: Fleet, tmp_path: Path, record_property: Any) -> None:
    pods = [{"url": url} for url in fleet.urls]
    reliability = {"health": {"stall": f"{STALL:g}s", "interval": "1s"}, "breaker": {"slowStart": 0}}
    config = json.dumps({"pods": {"static": pods}, "reliability": reliability})
    frozen, other = fleet.engines
    with proxy(fleet.urls, tmp_path / "proxy.log", config) as serving:
        wait_until(lambda: all(pod["state"] == "ready" for pod in serving.pods().values()))
        assert frozen.program.signal_workers(signal.SIGSTOP)
        began = time.monotonic()
        try:
            with ThreadPoolExecutor(12) as clients:
                responses = list(clients.map(lambda n: serving.http.post("/v1/completions", body_of(n)), range(12)))
            assert [(response.status, response.pod) for response in responses] == [(200, other.name)] * 12
            record_property("served by the other after", f"{time.monotonic() - began:.1f} s; stall {STALL:g} s")
            assert frozen.http.get("/health").status == 200
            shown = serving.pods()[frozen.name]
            assert shown["state"] == "ejected"
            assert "makes no progress" in shown["doubts"]
        finally:
            frozen.program.signal_workers(signal.SIGCONT)
        began = time.monotonic()
        back = wait_until(lambda: "makes no progress" not in serving.pods()[frozen.name]["doubts"], 20.0)
        record_property("trusted again after", f"{back - began:.1f} s")
        assert "Traceback" not in serving.program.log
