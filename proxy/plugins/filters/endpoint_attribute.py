"""Keep the pods whose scraped attribute meets a threshold."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, plugin
from proxy.core.request import InferenceRequest
from proxy.plugins.endpoint_data import attribute_reader

Operator = Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


@dataclass(frozen=True, slots=True)
class Threshold:
    operator: Operator = param(doc="comparison operator")
    value: float = param(doc="value to compare the attribute with")


@dataclass(frozen=True, slots=True)
class ThresholdAlgorithm:
    type: Literal["threshold"] = param(doc="kind of comparison; threshold is the only one")
    threshold: Threshold = param(doc="attribute operator value")


@plugin("endpoint-attribute-filter")
@dataclass(frozen=True, slots=True)
class EndpointAttributeFilter(Filter):
    """Keeps pods for which `attribute operator value` is true."""

    attribute: str = param(doc="name of the attribute, or `name/producer`")
    algorithm: ThresholdAlgorithm = param(doc="the comparison")
    producer: str = param("", "producer of the attribute, if several exist")
    on_missing: Literal["Pass", "Fail"] = param("Pass", "whether to keep or drop a pod without the attribute")
    fallback_on_empty: bool = param(False, "keep all pods if none passes")

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        read = attribute_reader(self.attribute, self.producer)
        kept = [endpoint for endpoint in endpoints if self._keeps(read(endpoint))]
        return endpoints if not kept and self.fallback_on_empty else kept

    def _keeps(self, value: float | None) -> bool:
        if value is None:
            return self.on_missing == "Pass"
        threshold = self.algorithm.threshold
        return _COMPARE[threshold.operator](value, threshold.value)
