"""Keep the pods whose labels match a Kubernetes label selector, or whose label has one of some values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class Requirement:
    key: str = param(doc="label")
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"] = param(
        doc="comparison operator; NotIn also keeps pods without the label"
    )
    values: tuple[str, ...] = param((), "values for In and NotIn")

    def __post_init__(self) -> None:
        wants_values = self.operator in ("In", "NotIn")
        if wants_values != bool(self.values):
            raise ValueError(f"operator {self.operator} takes {'at least one value' if wants_values else 'no values'}")

    def met_by(self, labels: Mapping[str, str]) -> bool:
        if self.operator == "Exists":
            return self.key in labels
        if self.operator == "DoesNotExist":
            return self.key not in labels
        return (labels.get(self.key) in self.values) == (self.operator == "In")


@plugin("label-selector-filter")
@dataclass(frozen=True, slots=True)
class LabelSelectorFilter(Filter):
    """Keeps pods that match all matchLabels and all matchExpressions. An empty selector keeps all pods."""

    match_labels: Mapping[str, str] = param({}, "labels and the values they must have")
    match_expressions: tuple[Requirement, ...] = param((), "requirements on single labels")

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if self._keeps(endpoint.labels)]

    def _keeps(self, labels: Mapping[str, str]) -> bool:
        if any(labels.get(key) != value for key, value in self.match_labels.items()):
            return False
        return all(requirement.met_by(labels) for requirement in self.match_expressions)


@plugin("by-label")
@dataclass(frozen=True, slots=True)
class ByLabel(Filter):
    """Keeps pods whose label has one of the values. Deprecated: use label-selector-filter, or the filter of a role."""

    label: str = param(doc="label")
    valid_values: tuple[str, ...] = param((), "values of the label")
    allows_no_label: bool = param(False, "keep pods without the label too")

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError("label: must not be empty")
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("validValues must not be empty unless allowsNoLabel is true")

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        wanted: set[str | None] = {*self.valid_values, *((None,) if self.allows_no_label else ())}
        return [endpoint for endpoint in endpoints if endpoint.labels.get(self.label) in wanted]
