"""By how much a pod was better than the next one."""

from __future__ import annotations

from typing import NamedTuple

from proxy.core.endpoint import Endpoint
from proxy.core.record import ProfileRecord
from proxy.explain.entry import Entry


class Margin(NamedTuple):
    """Between totals; negative where the picker has not taken the best."""

    over: Endpoint
    by: float


def margin(record: ProfileRecord, chosen: Endpoint) -> Margin | None:
    """None where it was alone, or was not scored."""
    totals = dict(zip(record.scored, record.totals, strict=True))
    others = [pod for pod in (*record.ranked, *record.scored) if pod is not chosen]
    if chosen not in totals or not others:
        return None
    other = max(others, key=totals.__getitem__)
    return Margin(other, totals[chosen] - totals[other])


def deciding(entry: Entry) -> ProfileRecord | None:
    """The run that chose who answers."""
    if entry.decision is None:
        return None
    return next((record for record in entry.records if record.profile == entry.decision.profile), None)


def contributions(entry: Entry, record: ProfileRecord, pod: Endpoint) -> list[tuple[str, float, float]]:
    """(scorer, raw, weighted) of one pod."""
    if pod not in record.scored:
        return []
    at, portions = record.scored.index(pod), entry.shares.get(record.profile, {})
    parts = {name: portions.get(name, (0.0, 0.0))[1] for name in record.scores}
    return [(name, scores[at], scores[at] * parts[name]) for name, scores in record.scores.items()]
