"""The `disaggregation` section."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.params import param
from proxy.core.units import Duration
from proxy.disagg.connectors import CONNECTORS, connector_named


@dataclass(frozen=True, slots=True)
class DisaggregationSettings:
    """How the KV cache of a prompt gets to the pod that answers, where a profile handler sends prompts to another one.
    All pods are configured for the same connector."""

    connector: str = param("nixl", f"that the engines are configured with: {', '.join(CONNECTORS)}")
    prefill_timeout: Duration = param(
        Duration(120.0), "for a prompt to be computed; then another pod is asked", more_than=0
    )

    def __post_init__(self) -> None:
        """Raises ValueError for a connector that is not known."""
        connector_named(self.connector)
