"""Engines that are full, freeze or stop lose no request that another one can serve.

One engine stays; beside it stands one after the other that does not. Half of the requests are on each when it happens:
streams that have begun, and complete responses. A stream that breaks off ends with an error event.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import Client, EngineResponse, Pending
from tests.vllm.fleet import MODEL, Engine, Proxy, Start, Vllm, proxy, started, wait_until, wait_until_equal

pytestmark = pytest.mark.vllm

COMPLETIONS = "/v1/completions"
DRAIN = 8
"""Seconds in which a stopping engine finishes its requests."""

BOUNDED = ("--max-num-seqs", "4", "--max-num-queued-reqs", "4", "--shutdown-timeout", str(DRAIN))
STREAMED, WHOLE = 8000, 6000
"""Tokens: of streams, which last until it happens, and of complete responses."""

STREAMS, WHOLES = 2, 1
"""On each engine. More than four would wait for one another."""

ERROR = b'"error":'
DONE = b"data: [DONE]\n\n"
ENDED_BY_ENGINE = "ended by the engine without a finish reason"


@dataclass(frozen=True, slots=True)
class Pair:
    """Before both engines."""

    proxy: Proxy
    survivor: Engine
    victim: Engine

    def load_on(self, engine: Engine) -> int:
        requests: int = self.proxy.pods()[engine.name]["load"]["requests"]
        return requests

    @contextmanager
    def only(self, engine: Engine) -> Iterator[None]:
        """Gets what is sent here: the other one is drained. Which of two idle engines is better is not asked."""
        (other,) = (one for one in (self.survivor, self.victim) if one is not engine)
        self._admin(other, "drain")
        yield
        self._admin(other, "undrain")

    def _admin(self, engine: Engine, what: str) -> None:
        response = self.proxy.admin.post(f"/admin/pods/{engine.name}/{what}", None)
        assert response.status == 200, response.body

    def says_of_victim(self) -> tuple[str, Sequence[str]]:
        pod = self.proxy.pods()[self.victim.name]
        return pod["state"], pod["doubts"]


@pytest.fixture(scope="module")
def start(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """By number, with further flags."""
    with ExitStack() as stack:

        def start(number: int, *flags: str) -> Engine:
            (engine,) = started(stack, vllm, tmp_path_factory.mktemp("engine"), [Start(number, flags)])
            return engine

        yield start


@pytest.fixture(scope="module")
def survivor(start: Callable[..., Engine]) -> Engine:
    return start(0)


@pytest.fixture(scope="module")
def bounded(start: Callable[..., Engine], survivor: Engine) -> Engine:
    """Of four requests at a time, four that wait, and an orderly end."""
    return start(1, *BOUNDED)


@pytest.fixture
def usual(start: Callable[..., Engine], survivor: Engine) -> Iterator[Engine]:
    """As vLLM is by default: it stops at once."""
    engine = start(1)
    yield engine
    engine.program.stop()


def test_a_full_queue_costs_no_request(survivor: Engine, bounded: Engine, tmp_path: Path, record_property: Any) -> None:
    """Two bursts. A full queue is a 503, or, in a burst, an error event under a head that says 200."""
    direct = burst(bounded.http, 12)
    refused = [response for response in direct if response.status == 503]
    events = [response for response in direct if response.status == 200 and ERROR in response.body]
    record_property("directly", f"{len(refused)} of {len(direct)} are 503, {len(events)} an event under 200")
    assert refused or events
    with before(survivor, bounded, tmp_path) as pair:
        responses = [response for _ in range(2) for response in burst(pair.proxy.http, 24)]
        assert [response.status for response in responses] == [200] * 48
        assert all(is_whole(response.body) for response in responses)
        retried = pair.proxy.sum("kvlane_retries_total")
    record_property("through the proxy", f"{len(responses)} of {len(responses)} whole, {retried:.0f} retries")


def test_streams_of_a_freezing_engine_end_with_an_error(
    survivor: Engine, bounded: Engine, tmp_path: Path, record_property: Any
) -> None:
    """The streams that had begun; the others wait no longer than until the stall is detected."""
    times = {"timeouts": {"idle": "4s"}, "health": {"stall": "3s", "interval": "1s"}, "breaker": {"slowStart": 0}}
    with before(survivor, bounded, tmp_path, times) as pair, under_way(pair) as (streams, wholes):
        try:
            assert bounded.program.signal_workers(signal.SIGSTOP)
            check(pair, streams, wholes, record_property)
            assert bounded.http.get("/health").status == 200
        finally:
            bounded.program.signal_workers(signal.SIGCONT)
    wait_until_equal(bounded.busy, 0)


def test_an_engine_that_finishes_before_it_stops_gets_no_new_requests(
    survivor: Engine, bounded: Engine, tmp_path: Path, record_property: Any
) -> None:
    """It says 200 at /health all the while, and 500 to every new request."""
    with before(survivor, bounded, tmp_path) as pair, under_way(pair) as (streams, wholes):
        bounded.program.terminate()
        direct = bounded.http.post(COMPLETIONS, body_of(1))
        record_property("directly", f"{direct.status}, {direct.json['error']['message']}")
        responses = [pair.proxy.http.post(COMPLETIONS, body_of(1, prompt=f"Hello {n}")) for n in range(20)]
        assert [(response.status, response.pod) for response in responses] == [(200, survivor.name)] * 20
        record_property("doubts", ", ".join(pair.says_of_victim()[1]))
        check(pair, streams, wholes, record_property)
    bounded.program.stop()


def test_an_engine_that_stops_at_once_leaves_no_client_waiting(
    survivor: Engine, usual: Engine, tmp_path: Path, record_property: Any
) -> None:
    """Its server accepts no connections then, and sends nothing on open ones, nor closes them."""
    with before(survivor, usual, tmp_path) as pair, under_way(pair) as (streams, wholes):
        usual.program.terminate()
        wait_until(lambda: pair.says_of_victim()[0] != "ready", 60.0)  # the engine is busy when it has to stop
        responses = [pair.proxy.http.post(COMPLETIONS, body_of(1, prompt=f"Hello {n}")) for n in range(20)]
        assert [(response.status, response.pod) for response in responses] == [(200, survivor.name)] * 20
        check(pair, streams, wholes, record_property, engine_ends_streams=True)


def test_an_engine_whose_core_is_killed_leaves_no_client_waiting(
    survivor: Engine, usual: Engine, tmp_path: Path, record_property: Any
) -> None:
    """The server outlives it for a moment, in which it says 500."""
    with before(survivor, usual, tmp_path) as pair, under_way(pair) as (streams, wholes):
        assert usual.program.signal_workers(signal.SIGKILL, b"EngineCore") == 1
        responses = [pair.proxy.http.post(COMPLETIONS, body_of(1, prompt=f"Hello {n}")) for n in range(20)]
        assert [(response.status, response.pod) for response in responses] == [(200, survivor.name)] * 20
        check(pair, streams, wholes, record_property)
    wait_until(lambda: not usual.http.up())


def body_of(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, **fields}


def burst(server: Client, size: int) -> list[EngineResponse]:
    """Streams of 20 tokens, all at once."""
    with ThreadPoolExecutor(size) as clients:
        bodies = [body_of(20, prompt=f"{time.time_ns()} {number}", stream=True) for number in range(size)]
        return list(clients.map(lambda body: server.post(COMPLETIONS, body), bodies))


@contextmanager
def before(survivor: Engine, victim: Engine, folder: Path, reliability: Any = None) -> Iterator[Pair]:
    pods = [{"url": engine.url} for engine in (survivor, victim)]
    config = json.dumps({"pods": {"static": pods}, "reliability": reliability or {}})
    with proxy([], folder / "proxy.log", config) as serving:
        wait_until(lambda: all(pod["state"] == "ready" for pod in serving.pods().values()))
        yield Pair(serving, survivor, victim)
        assert "Traceback" not in serving.program.log


@contextmanager
def under_way(pair: Pair) -> Iterator[tuple[list[Pending], list[Future[EngineResponse]]]]:
    """Streams that have begun and other requests that wait for their responses, as many of each on either engine."""
    streams: list[Pending] = []
    wholes: list[Future[EngineResponse]] = []
    with ExitStack() as stack:
        clients = stack.enter_context(ThreadPoolExecutor(2 * WHOLES))
        for engine in (pair.survivor, pair.victim):
            with pair.only(engine):
                for number in range(STREAMS):
                    body = body_of(STREAMED, prompt=f"Tell {number}", stream=True)
                    streams.append(stack.enter_context(pair.proxy.http.pending(COMPLETIONS, body)))
                    assert streams[-1].pod == engine.name
                for number in range(WHOLES):
                    body = body_of(WHOLE, prompt=f"Say {number}")
                    wholes.append(clients.submit(pair.proxy.http.post, COMPLETIONS, body))
                wait_until_equal(pair.proxy.in_flight, len(streams) + len(wholes))
                assert pair.load_on(engine) == STREAMS + WHOLES
        wait_until_equal(lambda: pair.survivor.busy() + pair.victim.busy(), len(streams) + len(wholes))
        yield streams, wholes


def check(
    pair: Pair,
    streams: Sequence[Pending],
    wholes: Sequence[Future[EngineResponse]],
    record_property: Any,
    *,
    engine_ends_streams: bool = False,
) -> None:
    """All complete responses arrive, and every stream of the victim is complete or ends with an error. An engine that
    stops at once may also end one itself, without a finish reason: it is relayed as the engine ended it."""
    since = time.monotonic()
    ends = {"whole": 0, "cut, with an error": 0, ENDED_BY_ENGINE: 0}
    for stream in streams:
        if stream.pod == pair.victim.name:
            body = stream.read_all()
            end = end_of(body)
            assert engine_ends_streams or end != ENDED_BY_ENGINE, body[-600:]
            ends[end] += 1
    record_property("its streams", ", ".join(f"{count} {end}" for end, count in ends.items() if count))
    record_property("ended after", f"{time.monotonic() - since:.1f} s")
    for stream in streams:
        if stream.pod == pair.survivor.name:
            assert stream.read(6) == b"data: "
            stream.hang_up()
    responses = [whole.result() for whole in wholes]
    for response in responses:
        assert response.status == 200, response.body
        assert response.json["usage"]["completion_tokens"] == WHOLE, (response.pod, response.body)
    moved = sum(response.pod == pair.survivor.name for response in responses)
    record_property("complete responses", f"{len(responses)}, {moved} of them by the other engine")
    record_property("all there after", f"{time.monotonic() - since:.1f} s")


def end_of(body: bytes) -> str:
    if is_whole(body):
        return "whole"
    if body.endswith(DONE) and ERROR not in body:
        return ENDED_BY_ENGINE
    assert says_that_it_broke(body), body[-600:]
    return "cut, with an error"


def is_whole(body: bytes) -> bool:
    return body.endswith(DONE) and ERROR not in body and b'"finish_reason":"length"' in body


def says_that_it_broke(body: bytes) -> bool:
    """With its last event. A server whose engine is dead says so itself, and that this is all."""
    return ERROR in body.removesuffix(DONE).split(b"\n\n")[-2]
