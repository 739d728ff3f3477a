"""Prefer pods with a high, or a low, scraped attribute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Scorer, plugin
from proxy.core.request import InferenceRequest
from proxy.plugins.endpoint_data import attribute_reader


@dataclass(frozen=True, slots=True)
class FixedRange:
    min: float = param(doc="lower end of the range")
    max: float = param(doc="upper end of the range")

    def __post_init__(self) -> None:
        if self.min >= self.max:
            raise ValueError(f"min: must be less than max, not {self.min:g} and {self.max:g}")


@dataclass(frozen=True, slots=True)
class AdaptiveRange:
    """The range from the lowest to the highest value of the candidates."""


@dataclass(frozen=True, slots=True)
class Normalization:
    fixed_range: FixedRange | None = param(None, "a configured range")
    adaptive_range: AdaptiveRange | None = param(None, "the range of the candidates' values; the default")

    def __post_init__(self) -> None:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("fixedRange and adaptiveRange exclude each other")


@dataclass(frozen=True, slots=True)
class LinearAlgorithm:
    type: Literal["linear_lower_is_better", "linear_higher_is_better"] = param(
        doc="whether higher or lower values are better"
    )
    normalization: Normalization = param(Normalization(), "range that is mapped to [0, 1]")


@plugin("endpoint-attribute-scorer")
@dataclass(frozen=True, slots=True)
class EndpointAttributeScorer(Scorer):
    """(value - min) / (max - min) clamped to [0, 1], or 1 minus that where lower is better; 0 without the attribute,
    and 1 for all that have it where the range is adaptive and all are equal."""

    attribute_key: str = param(doc="name of the attribute, or `name/producer`")
    algorithm: LinearAlgorithm = param(doc="how a value becomes a score")
    producer: str = param("", "producer of the attribute, if several exist")

    def __post_init__(self) -> None:
        if not self.attribute_key:
            raise ValueError("attributeKey: must not be empty")

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        values = list(map(attribute_reader(self.attribute_key, self.producer), endpoints))
        present = [value for value in values if value is not None]
        if not present:
            return [0.0] * len(values)
        fixed = self.algorithm.normalization.fixed_range
        low, high = (fixed.min, fixed.max) if fixed else (min(present), max(present))
        return [0.0 if value is None else self._score(value, low, high) for value in values]

    def _score(self, value: float, low: float, high: float) -> float:
        if low == high:
            return 1.0
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return 1.0 - share if self.algorithm.type == "linear_lower_is_better" else share
