"""A client that leaves frees the engine.

The time is from the end of the connection to the moment at which the engine's metrics say that nothing runs or waits.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from tests.vllm.fleet import MODEL, Fleet, wait_until_equal

pytestmark = pytest.mark.vllm

LONGEST = 1.0
"""Seconds that an engine may continue an unread response; undisturbed, these take many times that."""

ENDLESS = {"model": MODEL, "prompt": "Tell me", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(autouse=True)
def nothing_runs(fleet: Fleet) -> None:
    wait_until_equal(fleet.busy, 0)
    wait_until_equal(fleet.proxy.in_flight, 0)


def test_a_stream_before_its_first_token_is_aborted(fleet: Fleet, record_property: Any) -> None:
    prompt = [random.randrange(300, 4000) for _ in range(8000)]
    with fleet.http.pending("/v1/completions", {**ENDLESS, "prompt": prompt, "stream": True}) as stream:
        wait_until_equal(fleet.busy, 1)
        made = generated(fleet)
        took = seconds_to_idle(fleet, stream.hang_up())
    assert generated(fleet) == made, "the first token was there already"
    assert took < LONGEST
    record_property("idle after", f"{took * 1000:.0f} ms")


def test_a_stream_in_the_middle_is_aborted(fleet: Fleet, record_property: Any) -> None:
    with fleet.http.pending("/v1/completions", {**ENDLESS, "stream": True}) as stream:
        assert stream.read(2000).startswith(b"data: ")
        assert fleet.busy() == 1
        took = seconds_to_idle(fleet, stream.hang_up())
    assert took < LONGEST
    record_property("idle after", f"{took * 1000:.0f} ms")


def test_a_complete_response_is_aborted(fleet: Fleet, record_property: Any) -> None:
    with fleet.http.pending("/v1/completions", ENDLESS) as response:
        wait_until_equal(fleet.busy, 1)
        took = seconds_to_idle(fleet, response.hang_up())
    assert took < LONGEST
    record_property("idle after", f"{took * 1000:.0f} ms")


def test_clients_that_leave_together_leave_nothing_behind(fleet: Fleet, record_property: Any) -> None:
    """40 streams on two engines that run 16 at a time, so that some wait in the engines' queues."""
    with contextlib.ExitStack() as stack:
        bodies = [{**ENDLESS, "prompt": f"Tell {number} people", "stream": True} for number in range(40)]
        streams = [stack.enter_context(fleet.http.pending("/v1/completions", body)) for body in bodies]
        wait_until_equal(fleet.busy, 40)
        shares = [engine.busy() for engine in fleet.engines]
        left = [stream.hang_up() for stream in streams][-1]
        took = seconds_to_idle(fleet, left)
    assert took < 3 * LONGEST, "under this load a step takes longer, and so does asking for metrics"
    assert min(shares) > 0
    record_property("streams per engine", " and ".join(map(str, shares)))
    record_property("idle after", f"{took * 1000:.0f} ms")


def seconds_to_idle(fleet: Fleet, left: float) -> float:
    idle = wait_until_equal(fleet.busy, 0)
    wait_until_equal(fleet.proxy.in_flight, 0)
    return idle - left


def generated(fleet: Fleet) -> float:
    return sum(engine.sum("vllm:generation_tokens_total") for engine in fleet.engines)
