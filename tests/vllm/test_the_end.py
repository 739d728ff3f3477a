"""The end of the proxy when it is stopped, and of an engine that is killed.

These tests run last: one engine does not survive them.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.fleet import ADAPTER, MODEL, Fleet, proxy, wait_until

pytestmark = pytest.mark.vllm

COMPLETIONS = "/v1/completions"


def body_of(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, **fields}


def test_no_fault_was_logged(fleet: Fleet) -> None:
    assert "Traceback" not in fleet.proxy.program.log


def test_a_stopping_proxy_lets_streams_end(fleet: Fleet, tmp_path: Path, record_property: Any) -> None:
    with proxy(fleet.urls, tmp_path / "proxy.log") as second:
        with second.http.pending(COMPLETIONS, body_of(200, stream=True)) as stream:
            assert stream.read(6) == b"data: "
            started = time.monotonic()
            second.program.terminate()
            assert stream.read_all().endswith(b"data: [DONE]\n\n")
        assert second.program.ended() == 0
        assert "Traceback" not in second.program.log
    record_property("stopped after", f"{time.monotonic() - started:.1f} s, 200 tokens included")


def test_the_stream_of_a_killed_engine_ends_with_an_error(fleet: Fleet) -> None:
    with fleet.http.pending(COMPLETIONS, body_of(8000, model=ADAPTER, stream=True)) as stream:
        assert stream.read(6) == b"data: "
        fleet.adapted.program.kill()
        rest = stream.read_all()
    assert b"[DONE]" not in rest
    assert b'"error"' in rest.split(b"\n\n")[-2]


def test_the_other_engine_responds_then(fleet: Fleet, record_property: Any) -> None:
    """Half of the prompts had been at home on the one that is gone."""
    responses = [fleet.http.post(COMPLETIONS, body_of(1, prompt=f"Hello {n}")) for n in range(20)]
    assert [response.status for response in responses] == [200] * 20
    assert {response.pod for response in responses} == {fleet.engines[0].name}
    record_property("requests", len(responses))


def test_a_model_of_the_killed_engine_alone_is_503(fleet: Fleet) -> None:
    """It was known, so it is not 404."""
    wait_until(lambda: fleet.proxy.pods()[fleet.adapted.name]["state"] != "ready")
    assert fleet.http.post(COMPLETIONS, body_of(1, model=ADAPTER)).status == 503
    assert fleet.http.get("/health").status == 200


def test_a_stream_of_a_stopping_engine_shows_how_it_ended(fleet: Fleet, record_property: Any) -> None:
    """vLLM finishes it, or aborts it and says so, or leaves it open without a byte, which kvlane ends."""
    with fleet.http.pending(COMPLETIONS, body_of(2000, stream=True)) as stream:
        assert stream.read(6) == b"data: "
        began = time.monotonic()
        fleet.engines[0].program.terminate()
        rest = stream.read_all()
    last = json.loads([event for event in rest.split(b"\n\n") if event.startswith(b"data: {")][-1][6:])
    ending = "error" if "error" in last else last["choices"][0]["finish_reason"]
    assert ending in ("length", "abort", "error")
    assert (b"[DONE]" in rest) or ending == "error"
    record_property("ended after", f"{time.monotonic() - began:.1f} s, with {ending}")
