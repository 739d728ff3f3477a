"""The `disaggregation` section of a pool, and warnings about a pool whose requests cannot be split."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from proxy.core.params import Duration, param
from proxy.disagg.connectors import NAMES, connector_named


@dataclass(frozen=True, slots=True)
class DisaggregationSettings:
    """Transfer of KV caches from prefill to decode pods, for pools whose profile handler separates the two. All pods
    use the same connector."""

    connector: str = param("nixl", f"connector that the engines are configured with: {', '.join(NAMES)}")
    prefill_timeout: Duration = param(
        Duration(120.0), "time for the prefill of a prompt; then another pod is tried", more_than=0
    )

    def __post_init__(self) -> None:
        if self.connector not in NAMES:
            connector_named(self.connector)


ROLES = ("prefill", "decode", "encode", "both", "prefill-decode", "encode-prefill", "encode-prefill-decode")
"""The roles that the filters of a stage know. A label selector can select any other role."""

HANDLERS = frozenset({"disagg-profile-handler", "pd-profile-handler"})
FILTERS = {"prefill-filter": "prefill", "encode-filter": "encode"}
ALWAYS = "always-disagg-pd-decider"
DECIDERS = ("prefix-based-pd-decider", "predicted-latency-pd-decider")


def warnings(connector: str, pool: str, types: Collection[str], roles: Collection[str] | None) -> Iterator[str]:
    """Yield a sentence for each, beginning with its path. `types`: types of the pool's plugins; `roles`: roles of all
    pods that it will ever have, None if unknown."""
    path = "" if pool == "default" else f"pools.{pool}."
    if not HANDLERS.intersection(types):
        if roles is not None and "prefill" in roles and "decode" in roles:
            yield (
                f"{path}pods: some have the role prefill and some decode, but {path}scheduling has no"
                " disagg-profile-handler, so no request is split."
            )
        return
    if connector_named(connector).needs_pair and (some := [kind for kind in DECIDERS if kind in types]):
        yield (
            f"{path}scheduling: with the connector {connector} no pod can serve a request alone, so requests that"
            f" {some[0]} does not split are refused; use {ALWAYS}."
        )
    for kind, role in FILTERS.items():
        if roles is not None and kind in types and not any(role in each or each == "both" for each in roles):
            yield f"{path}pods: no pod has the role {role}, so {kind} removes all pods."
