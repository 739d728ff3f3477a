"""Each claim of bench/chaos.py has evidence against it that is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bench.disorder.clients import Ask, Saw, Seen, asks
from bench.disorder.ledger import Evidence, cancel_seconds, findings, why_unserved
from proxy.lab.sim import RequestRecord

USAGE = b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n'
ERROR_EVENT = b'data: {"error":{"message":"The pod stopped responding"}}\n\n'


def request(**details: Any) -> Ask:
    return replace(Ask("r", "/v1/completions", b"", True, 7, None, None), **details)


def seen(saw: Saw = Saw.WHOLE, status: int | None = 200, body: bytes = USAGE, **details: Any) -> Seen:
    return Seen(request(), 100.0, 101.0, saw, status, body=body, **details)


def record(status: int | None = 200, ended: float | None = 101.0, **details: Any) -> RequestRecord:
    one = RequestRecord("r", "POST", "/v1/completions", {}, 100.1, status=status, ended=ended)
    for name, value in details.items():
        setattr(one, name, value)
    return one


def line(outcome: str = "complete", status: int = 200, endpoint: str = "pod-0", attempts: int = 1) -> dict[str, Any]:
    return {"outcome": outcome, "status": status, "endpoint": endpoint, "attempts": attempts}


def counted(outcome: str, status: str, retries: float = 0) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    labels = frozenset({"outcome": outcome, "status": status, "model": "sim", "path": "completions"}.items())
    return {("kvlane_requests_total", labels): 1.0, ("kvlane_retries_total", frozenset()): retries}


def served(**details: Any) -> Evidence:
    """One request, served by the first of two pods."""
    whole = Evidence(
        seen=[seen()],
        lines={"r": [line()]},
        records=[[record()], []],
        unwell=[],
        ejections=[],
        samples=counted("complete", "2xx"),
        requested=1,
    )
    return replace(whole, **details)


def refused(status: int, reason: str = "", outcome: str = "complete", attempts: int = 1, **details: Any) -> Evidence:
    """One request, declined by the first of two pods."""
    return served(
        seen=[replace(seen(Saw.REFUSED, status, b"{}"), reason=reason)],
        lines={"r": [line(outcome, status, attempts=attempts)]},
        records=[[record(status=503)], []],
        samples=counted("upstream-failed" if outcome == "upstream-failed" else "complete", "5xx", attempts - 1),
        **details,
    )


def against(evidence: Evidence) -> set[str]:
    return {finding.claim for finding in findings(evidence) if finding.against}


def test_a_served_request_violates_no_claim() -> None:
    assert against(served()) == set()


def test_probes_of_the_proxy_are_in_no_log() -> None:
    assert against(served(records=[[record()], [record(id="its own")]])) == set()


LOST = "nothing is lost that another pod could have served"
PODS = "the pods' logs say what the access log says"
LOG = "the access log says what clients saw"
DECEPTIVE = "no broken response looks complete"

CASES: dict[str, tuple[Callable[[], Evidence], set[str]]] = {
    "a client that never came back": (lambda: served(requested=2), {"every request has one ending"}),
    "a request on a pod that is in no log": (
        lambda: served(seen=[seen(Saw.LEFT, None)], lines={}, samples={}),
        {PODS},
    ),
    "a request that was logged twice": (
        lambda: served(lines={"r": [line(), line()]}),
        {"every request has one ending", "the metrics count what the access log lists"},
    ),
    "a log that knows of an end where the client saw a cut": (
        lambda: served(seen=[seen(Saw.ERROR_EVENT, body=ERROR_EVENT)]),
        {LOG},
    ),
    "a response that no pod gave": (lambda: served(records=[[record(cut=True)], []]), {PODS, DECEPTIVE}),
    "a response of another pod": (lambda: served(records=[[], [record()]]), {PODS}),
    "a response that two pods gave": (lambda: served(records=[[record()], [record()]]), {PODS}),
    "a call that the proxy does not know": (
        lambda: served(lines={}, samples={}),
        {PODS, "every request has one ending"},
    ),
    "a request that was not counted": (lambda: served(samples={}), {"the metrics count what the access log lists"}),
    "an error beside a pod that was not asked": (lambda: refused(503), {LOST}),
    "no response at all": (
        lambda: served(seen=[seen(Saw.NOTHING, None)]),
        {LOST, LOG},
    ),
    "a stream that just ends": (lambda: served(seen=[seen(Saw.UNFINISHED)]), {DECEPTIVE}),
    "an error that [DONE] follows": (
        lambda: served(
            seen=[seen(Saw.ERROR_EVENT, body=ERROR_EVENT + b"data: [DONE]\n\n")],
            lines={"r": [line("upstream-failed")]},
            samples=counted("upstream-failed", "2xx"),
        ),
        {DECEPTIVE},
    ),
    "tokens that are missing": (lambda: served(seen=[seen(body=USAGE.replace(b"7", b"6"))]), {DECEPTIVE}),
    "a pod that goes on": (
        lambda: served(records=[[record(), record(ended=None)], []]),
        {"every cancel reaches its pod"},
    ),
    "a call that is still open": (
        lambda: served(still_open=[0, 1]),
        {"nothing is in flight or queued in the end"},
    ),
    "a gauge that is not back at zero": (
        lambda: served(
            samples={
                **counted("complete", "2xx"),
                ("kvlane_endpoint_in_flight_requests", frozenset({("endpoint", "pod-0")})): 1.0,
            }
        ),
        {"nothing is in flight or queued in the end"},
    ),
    "memory that is not given back": (
        lambda: served(leftovers=["80 MiB more"]),
        {"memory and descriptors are as before"},
    ),
    "a traceback": (
        lambda: served(complaints=["Traceback (most recent call last):"]),
        {"no fault of the proxy's own in its log"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_violation_is_found(case: str) -> None:
    evidence, claims = CASES[case]
    assert against(evidence()) == claims


def test_a_corrupt_response_is_attributed_to_the_pod() -> None:
    corrupt = served(seen=[seen(body=b"data: {")], records=[[record(fault="corrupt")], []])
    assert against(corrupt) == set()


def test_bytes_written_just_before_a_reset_may_or_may_not_arrive() -> None:
    twice = served(records=[[record()], [record()]])
    assert against(twice) == {PODS}
    assert against(replace(twice, resets=[(1, 101.05)])) == set()
    assert against(replace(twice, resets=[(1, 101.5)])) == {PODS}
    cut = served(records=[[record(cut=True)], []])
    assert against(cut) == {PODS, DECEPTIVE}
    assert against(replace(cut, resets=[(0, 100.95)])) == set()
    assert against(replace(cut, resets=[(1, 101.0)])) == {PODS, DECEPTIVE}
    assert against(served(records=[[record(cut=True, fault="drip")], []])) == set()


def test_a_faulty_pod_could_not_have_served() -> None:
    assert against(refused(503, unwell=[(1, 100.5, 100.6)])) == set()
    assert against(refused(503, unwell=[(1, 90.0, 91.0), (1, 101.5, 102.0)])) == {LOST}


def test_a_pod_that_the_proxy_ejected_is_counted_apart() -> None:
    ejected = refused(503, ejections=[(1, 100.0, 101.0)])
    assert why_unserved(ejected, ejected.seen[0]) == "no pod left: every pod was tried, not ready or ejected"


@pytest.mark.parametrize(
    ("evidence", "why"),
    [
        (refused(503, "suspected-poison", "suspected-poison"), "bound: two pods died under it"),
        (refused(502, "upstream-failed", "upstream-failed", attempts=8), "bound: its attempts"),
    ],
)
def test_a_configured_limit_is_counted_apart(evidence: Evidence, why: str) -> None:
    assert why_unserved(evidence, evidence.seen[0]) == why


def test_a_deadline_is_counted_apart() -> None:
    late = refused(504, "upstream-timed-out", "upstream-timed-out")
    late.seen[0].ended = 108.0
    assert why_unserved(late, late.seen[0]) == "bound: its deadline"


def test_a_cancellation_lasts_until_the_pod_stops() -> None:
    evidence = served(
        seen=[seen(Saw.LEFT, None)],
        lines={"r": [line("client-gone", 499)]},
        records=[[record(status=None, ended=101.5, aborted=True)], []],
        samples=counted("client-gone", "4xx"),
    )
    assert cancel_seconds(evidence) == [0.5]
    assert against(evidence) == set()
    evidence.records[0][0].ended = 104.0
    assert against(evidence) == {"every cancel reaches its pod"}


def test_requests_are_the_same_in_every_run() -> None:
    assert list(asks(50, 1)) == list(asks(50, 1))
    assert list(asks(50, 1)) != list(asks(50, 2))
