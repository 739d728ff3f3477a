"""Sections `scheduling` for common policies, as YAML data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Section = dict[str, Any]

PICKER = "max-score-picker"
LISTENS = 5557
"""The usual port for KV events."""


def picked_by(picker: str) -> Section:
    """Return a section with this picker and no scorers."""
    return {"plugins": [{"type": picker}], "schedulingProfiles": [_profile("default", {picker: None})]}


def scored_by(scorers: Mapping[str, float], parameters: Mapping[str, Section] | None = None) -> Section:
    """Return a section that picks the pod with the highest weighted sum of scores."""
    given = parameters or {}
    plugins = [{"type": name} | ({"parameters": given[name]} if name in given else {}) for name in (*scorers, PICKER)]
    return {"plugins": plugins, "schedulingProfiles": [_profile("default", {**scorers, PICKER: None})]}


def exact() -> Section:
    """Return a section with a precise prefix index: pods publish KV events and tokenise prompts."""
    scorers = {"prefix-cache-scorer": 3, "queue-scorer": 2, "active-request-scorer": 1}
    section = scored_by(scorers)
    discovery = {"kvEventsConfig": {"podDiscoveryConfig": {"socketPort": LISTENS}}}
    section["plugins"][:0] = [
        {"type": "token-producer", "parameters": {"pod": {}}},
        {"type": "precise-prefix-cache-producer", "parameters": discovery},
        {"type": "approx-prefix-cache-producer"},
        {"type": "exact-or-approx-prefix-cache-producer"},
    ]
    return section


def disaggregated(needs_pair: bool) -> Section:
    """Return a section in which prefill pods compute prompts: always if no pod serves alone, else if that is faster."""
    decider = "always-disagg-pd-decider" if needs_pair else "predicted-latency-pd-decider"
    producers = ("approx-prefix-cache-producer", "predicted-latency-producer")
    types = (*producers, "decode-filter", "prefill-filter", "latency-scorer", PICKER, decider)
    handler = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider}}}
    roles = ("decode", "prefill")
    return {
        "plugins": [*({"type": name} for name in types), handler],
        "schedulingProfiles": [
            _profile(role, {f"{role}-filter": None, "latency-scorer": None, PICKER: None}) for role in roles
        ],
    }


def session(header: str) -> Section:
    """Return a section in which requests with the same value of this header stay on a pod that is not far behind."""
    by_header = {
        "strategy": "session_id",
        "sessionIdConfig": {"sources": [{"header": header}]},
        "rebalance": {"requests": 16},
    }
    scorers = {"session-affinity-scorer": 3, "queue-scorer": 1, "active-request-scorer": 1}
    return scored_by(scorers, {"session-affinity-scorer": by_header})


def _profile(name: str, plugins: Mapping[str, float | None]) -> Section:
    refs: Sequence[Section] = [{"pluginRef": ref} | ({"weight": by} if by else {}) for ref, by in plugins.items()]
    return {"name": name, "plugins": refs}
