"""A decision in one line, for a response header: a dictionary of structured fields (RFC 9651, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.core.endpoint import Endpoint
from proxy.explain.entry import Entry
from proxy.explain.margin import contributions, deciding, margin
from proxy.explain.table import cached, of_pod

HEADER = "x-kvlane-decision"

MOST_CHARACTERS = 1000
LONGEST_NAME = 100


def summary(entry: Entry, pod: Endpoint) -> str:
    """ASCII, less than 1 KiB. `pod` is the one that the leg goes to; scorers come in the order of what they add to its
    total, and the last of them are left out where there is no room."""
    fields = list(_fields(entry, pod))
    scores = _scores(entry)
    while scores and len(_written(fields, scores)) > MOST_CHARACTERS:
        scores.pop()
    return _written(fields, scores)


def _written(fields: list[str], scores: list[str]) -> str:
    return ", ".join([*fields, *([f"scores=({' '.join(scores)})"] if scores else [])])


def _fields(entry: Entry, pod: Endpoint) -> Iterator[str]:
    decision, record = entry.decision, deciding(entry)
    if decision is None:
        return
    yield f"id={_string(entry.id)}"
    yield f"pod={_string(decision.target.name)}"
    if pod is not decision.target:
        yield f"sent-to={_string(pod.name)}"
    if decision.prefill:
        yield f"prefill={_string(decision.prefill[0].name)}"
    yield f"pool={_string(entry.pool)}"
    yield f"profile={_string(decision.profile)}"
    yield f"candidates={len(entry.candidates)}"
    if record is not None and (ahead := margin(record, decision.target)) is not None:
        yield f"margin={ahead.by:.3f}"
        yield f"runner-up={_string(ahead.over.name)}"
    computing = decision.prefill[0] if decision.prefill else decision.target
    yield f"prompt={entry.prompt_tokens}"
    if (hit := of_pod(entry, entry.hits, computing)) is not None:
        yield f"hit={cached(entry, int(hit), computing)}"
    if (ttft := of_pod(entry, entry.ttfts, computing)) is not None:
        yield f"ttft={ttft:.3f}"
    yield f"waited={entry.decided_at - entry.received_at:.3f}"


def _scores(entry: Entry) -> list[str]:
    record = deciding(entry)
    if record is None or entry.decision is None:
        return []
    parts = sorted(contributions(entry, record, entry.decision.target), key=lambda part: -part[2])
    return [f"{_string(name)};raw={raw:.3f};part={weighted:.3f}" for name, raw, weighted in parts]


def _string(text: str) -> str:
    """Of names that an operator gave: what a header cannot have is a question mark."""
    plain = "".join(one if " " <= one <= "~" else "?" for one in text[:LONGEST_NAME])
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
