"""Whether clients, proxy and pods tell the same story, and nothing is left over when it is over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from bench.disorder.clients import Saw, Seen, is_all_there
from bench.disorder.program import RETRIES, Samples
from proxy.lab.sim import FaultKind, RequestRecord

Line = Mapping[str, Any]
"""Of the access log."""

SURE = 1.0
"""Seconds before a request from which on a pod has to have been well and known, to count as one that could have served
it: so long the proxy may take to notice that it is back."""

DEADLINE = 8.0
NEAR = 1.1
"""Seconds before a deadline in which nothing new may be begun: the longest pause between two tries, and a little."""

CANCEL = 2.0
"""Seconds within which a pod has to see that a client has left, on a machine that is busy with the pods, too."""

RESET_TAKES = 0.1
"""Seconds before a pod's connections are reset in which what it has written may be lost on the way, and after it in
which it may not know that all of it arrived."""

CUT = frozenset({"upstream-failed", "timed-out", "evicted"})
AGREES = {
    Saw.WHOLE: lambda line: line["outcome"] == "complete" and line["status"] == 200,
    Saw.REFUSED: lambda line: line["outcome"] == "complete" or line["status"] >= 400,
    Saw.ERROR_EVENT: lambda line: line["outcome"] in CUT,
    Saw.BROKEN: lambda line: line["outcome"] in CUT,
    Saw.UNFINISHED: lambda line: line["outcome"] == "complete",
    Saw.NOTHING: lambda line: False,
    Saw.LEFT: lambda line: line["outcome"] not in {"evicted"},
}
"""What a line says of the outcome, by what the client saw. One that leaves may leave just after the end."""

BOUND, NO_POD_LEFT = "bound", "no pod left"


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim, and everything that speaks against it."""

    claim: str
    against: list[str]


@dataclass(frozen=True)
class Evidence:
    """All that was seen. `unwell` says which pod was in trouble, or away, from when to when, `doubts` which one the
    proxy assumed; clients and pods have one clock. `replaced` says that processes of the proxy
    were, and took their counts along."""

    seen: Sequence[Seen]
    lines: Mapping[str, Sequence[Line]]
    records: Sequence[Sequence[RequestRecord]]
    unwell: Sequence[tuple[int, float, float]]
    ejections: Sequence[tuple[int, float, float]]
    samples: Samples
    resets: Sequence[tuple[int, float]] = ()
    """When which pod broke off all its connections."""
    still_open: Sequence[int] = ()
    """Calls in flight on each pod, after everything."""
    complaints: Sequence[str] = ()
    requested: int = 0
    replaced: bool = False
    leftovers: Sequence[str] = field(default_factory=list)

    @cached_property
    def visits(self) -> Mapping[str, Sequence[tuple[int, RequestRecord]]]:
        """Calls of each request, with the number of their pod, in the order of arrival."""
        found: dict[str, list[tuple[int, RequestRecord]]] = defaultdict(list)
        for pod, records in enumerate(self.records):
            for record in records:
                found[record.id].append((pod, record))
        for calls in found.values():
            calls.sort(key=lambda call: call[1].arrived)
        return found


def findings(evidence: Evidence) -> list[Finding]:
    checks: Sequence[tuple[str, Callable[[Evidence], list[str]]]] = (
        ("every request has one ending", _endings),
        ("the access log says what clients saw", _log_agrees),
        ("the pods' logs say what the access log says", _pods_agree),
        ("the metrics count what the access log lists", _metrics_agree),
        ("nothing is lost that another pod could have served", _lost),
        ("no broken response looks complete", _deceptive),
        ("every cancel reaches its pod", _cancels),
        ("nothing is in flight or queued in the end", _in_flight),
        ("memory and descriptors are as before", lambda evidence: list(evidence.leftovers)),
        ("no fault of the proxy's own in its log", lambda evidence: list(evidence.complaints)),
    )
    return [Finding(claim, check(evidence)) for claim, check in checks]


def unserved(evidence: Evidence) -> Counter[str]:
    """Requests that got an error, by the reason why no other pod served them."""
    return Counter(why for seen in evidence.seen if (why := why_unserved(evidence, seen)))


def accounts(evidence: Evidence, limit: int) -> list[str]:
    """For the first lost requests: their faults by pod, and the pods that were skipped."""
    problems = []
    for seen in evidence.seen:
        if why := why_unserved(evidence, seen):
            calls = [f"{pod} {record.fault} {record.status}" for pod, record in evidence.visits.get(seen.ask.id, ())]
            problems.append(f"{seen.ask.id} after {seen.ended - seen.began:.2f} s: {why}; {calls}")
    return problems[:limit]


def cancel_seconds(evidence: Evidence) -> list[float]:
    """From a client's leaving to its pod's knowing, in order of size; of pods that had the request then."""
    waits = [
        record.ended - seen.ended
        for seen in evidence.seen
        if seen.saw is Saw.LEFT
        for _, record in evidence.visits.get(seen.ask.id, ())
        if record.ended is not None and record.aborted and record.ended >= seen.ended
    ]
    return sorted(waits)


def why_unserved(evidence: Evidence, seen: Seen) -> str:
    """Empty for requests with a response; "lost" if a healthy pod was not tried, and no limit that is
    configured forbids it."""
    if seen.saw is Saw.NOTHING:
        return "lost: no response"
    if seen.saw is not Saw.REFUSED:
        return ""
    calls = evidence.visits.get(seen.ask.id, ())
    if seen.ended - seen.began >= (seen.ask.timeout or DEADLINE) - NEAR:
        return f"{BOUND}: its deadline"
    spare = _spare(evidence, seen)
    if not spare:
        return f"{NO_POD_LEFT}: every pod was tried or not ready"
    if not spare - _ejected_during(evidence.ejections, seen):
        return f"{NO_POD_LEFT}: every pod was tried, not ready or ejected"
    return _bound(evidence, seen, [record for _, record in calls]) or f"lost: {seen.status} {seen.reason}".rstrip()


def _spare(evidence: Evidence, seen: Seen) -> set[int]:
    """Pods that were well all the time, and were not asked."""
    tried = {pod for pod, _ in evidence.visits.get(seen.ask.id, ())}
    return set(range(len(evidence.records))) - tried - _ejected_during(evidence.unwell, seen)


def _bound(evidence: Evidence, seen: Seen, calls: Sequence[RequestRecord]) -> str:
    lines = evidence.lines.get(seen.ask.id, ())
    if seen.reason == "suspected-poison":
        return f"{BOUND}: two pods died under it"
    if seen.status == 429 and sum(call.status == 429 for call in calls) > 1:
        return f"{BOUND}: two pods said 429"
    if lines and lines[0]["attempts"] >= RETRIES["attempts"]:
        return f"{BOUND}: its attempts"
    return ""


def _ejected_during(spans: Sequence[tuple[int, float, float]], seen: Seen) -> set[int]:
    return {pod for pod, since, until in spans if since <= seen.ended and until >= seen.began - SURE}


def _endings(evidence: Evidence) -> list[str]:
    against = (
        [f"{evidence.requested} sent, {len(evidence.seen)} returned"]
        if evidence.requested != len(evidence.seen)
        else []
    )
    for seen in evidence.seen:
        lines = len(evidence.lines.get(seen.ask.id, ()))
        if lines > 1 or (not lines and seen.saw is not Saw.LEFT):
            against.append(f"{seen.ask.id}: {lines} lines, the client saw: {seen.saw.value}")
    return against


def _log_agrees(evidence: Evidence) -> list[str]:
    return [
        f"{seen.ask.id}: the client saw {seen.saw.value} {seen.status}, the log says {line['status']} {line['outcome']}"
        for seen in evidence.seen
        for line in evidence.lines.get(seen.ask.id, ())
        if not AGREES[seen.saw](line) or (seen.saw is Saw.REFUSED and line["status"] != seen.status)
    ]


def _pods_agree(evidence: Evidence) -> list[str]:
    against = [
        f"{name}: {whole} pods sent a complete response: {[(pod, record.fault, record.ended) for pod, record in calls]}"
        for name, calls in evidence.visits.items()
        if (whole := sum(_arrived(evidence, *call) and call[1].fault != FaultKind.ERROR_FIRST.value for call in calls))
        > 1
    ]
    for name, lines in evidence.lines.items():
        if lines[0]["outcome"] == "complete" and lines[0]["status"] == 200 and "endpoint" in lines[0]:
            pod = int(lines[0]["endpoint"].removeprefix("pod-"))
            if not any(_may_be_whole(evidence, *call) for call in evidence.visits.get(name, ()) if call[0] == pod):
                against.append(f"{name}: complete by the log, not by {lines[0]['endpoint']}")
    # Requests without a client are the proxy's own: it lets ejected pods generate one token.
    requested = {seen.ask.id for seen in evidence.seen}
    against += [
        f"{name}: on a pod, but not in the log" for name in evidence.visits.keys() & (requested - evidence.lines.keys())
    ]
    return against


def _metrics_agree(evidence: Evidence) -> list[str]:
    if evidence.replaced:
        return []
    lines = [line for lines in evidence.lines.values() for line in lines]
    logged = Counter(f"{_label(line)} {line['status'] // 100}xx" for line in lines)
    counted: Counter[str] = Counter()
    for (name, labels), value in evidence.samples.items():
        if name == "kvlane_requests_total":
            counted[f"{dict(labels)['outcome']} {dict(labels)['status']}"] += int(value)
    against = [
        f"{what}: {logged[what]} in the log, {counted[what]} counted"
        for what in {*logged, *counted}
        if logged[what] != counted[what]
    ]
    retries = sum(max(0, line["attempts"] - 1) for line in lines)
    counted_retries = sum(value for (name, _), value in evidence.samples.items() if name == "kvlane_retries_total")
    if retries != counted_retries:
        against.append(f"{retries} retries in the log, {counted_retries:g} counted")
    return against


def _label(line: Line) -> str:
    """What the metrics call an outcome: refusals are one, unless a pod is why."""
    outcome = str(line["outcome"]).replace("upstream-timed-out", "timed-out")
    return outcome if outcome in {"complete", "client-gone"} | CUT else "refused"


def _lost(evidence: Evidence) -> list[str]:
    return [
        f"{seen.ask.id}: {why}; asked: {[pod for pod, _ in evidence.visits.get(seen.ask.id, ())]}, not asked:"
        f" {sorted(_spare(evidence, seen) - _ejected_during(evidence.ejections, seen))} {seen.error}"
        for seen in evidence.seen
        if (why := why_unserved(evidence, seen)).startswith("lost")
    ]


def _deceptive(evidence: Evidence) -> list[str]:
    against = []
    for seen in evidence.seen:
        calls = evidence.visits.get(seen.ask.id, ())
        if seen.saw is Saw.UNFINISHED:
            against.append(f"{seen.ask.id}: ended without its last event, and without an error")
        elif seen.saw is Saw.ERROR_EVENT and b"[DONE]" in seen.body.rpartition(b'data: {"error"')[2]:
            against.append(f"{seen.ask.id}: an error, and then [DONE]")
        elif seen.saw is Saw.WHOLE and not any(_may_be_whole(evidence, *call) for call in calls):
            against.append(f"{seen.ask.id}: whole for its client, on no pod")
        elif seen.saw is Saw.WHOLE and not is_all_there(seen) and not _is_corrupt(calls):
            against.append(f"{seen.ask.id}: tokens are missing, after {[record.fault for _, record in calls]}")
    return against


def _is_corrupt(calls: Sequence[tuple[int, RequestRecord]]) -> bool:
    """What makes no sense above HTTP is passed on as it is."""
    return any(record.fault == FaultKind.CORRUPT.value for _, record in calls)


def _cancels(evidence: Evidence) -> list[str]:
    against = []
    for seen in evidence.seen:
        for pod, record in evidence.visits.get(seen.ask.id, ()):
            if record.ended is None:
                against.append(f"{seen.ask.id}: goes on for ever on pod-{pod}")
            elif seen.saw is Saw.LEFT and record.ended - seen.ended > CANCEL:
                against.append(f"{seen.ask.id}: pod-{pod} knew after {record.ended - seen.ended:.2f} s")
    return against


def _in_flight(evidence: Evidence) -> list[str]:
    against = [f"pod-{pod}: {number} calls" for pod, number in enumerate(evidence.still_open) if number]
    for (name, labels), value in evidence.samples.items():
        if (
            value
            and ("in_flight" in name or "queue" in name)
            and not name.endswith(("_total", "_bucket", "_count", "_sum"))
        ):
            against.append(f"{name}{dict(labels)} is {value:g}")
    return against


def _arrived(evidence: Evidence, pod: int, record: RequestRecord) -> bool:
    return _is_whole(record) and not _at_a_reset(evidence, pod, record)


def _may_be_whole(evidence: Evidence, pod: int, record: RequestRecord) -> bool:
    """A drip continues although its pod was killed: it has the complete response already."""
    may_be = record.fault == FaultKind.DRIP.value or _at_a_reset(evidence, pod, record)
    return _is_whole(record) or (record.status == 200 and may_be)


def _at_a_reset(evidence: Evidence, pod: int, record: RequestRecord) -> bool:
    ended = record.ended
    return ended is not None and any(at == pod and abs(when - ended) < RESET_TAKES for at, when in evidence.resets)


def _is_whole(record: RequestRecord) -> bool:
    """A complete valid response, by the pod's log."""
    return record.status == 200 and record.ended is not None and not record.aborted and not record.cut
