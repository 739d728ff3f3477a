"""Roles, deciders and connectors that are good each by itself, and do not work together."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from proxy.disagg.connectors import connector_named

HANDLERS = frozenset({"disagg-profile-handler", "pd-profile-handler"})
FILTERS = {"prefill-filter": "prefill", "encode-filter": "encode"}
ALWAYS = "always-disagg-pd-decider"
DECIDERS = ("prefix-based-pd-decider", "predicted-latency-pd-decider")


def cautions(connector: str, pool: str, types: Collection[str], roles: Collection[str] | None) -> Iterator[str]:
    """A sentence for each, beginning with its path. `types` are those of the pool's plugins, `roles` of all pods that
    there will ever be in it; None if nobody knows."""
    path = "" if pool == "default" else f"pools.{pool}."
    if not HANDLERS.intersection(types):
        if roles is not None and "prefill" in roles and "decode" in roles:
            yield (
                f"{path}pods: some have the role prefill and some decode, but nothing in {path}scheduling hands"
                " prompts over; see disagg-profile-handler."
            )
        return
    if connector_named(connector).needs_pair and (some := [kind for kind in DECIDERS if kind in types]):
        yield (
            f"{path}scheduling: with the connector {connector} no pod serves a request alone, so what {some[0]}"
            f" decides against is refused; take {ALWAYS}."
        )
    for kind, role in FILTERS.items():
        if roles is not None and kind in types and not any(role in each or each == "both" for each in roles):
            yield f"{path}pods: none has the role {role}, so {kind} never keeps one."
