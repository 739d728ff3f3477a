"""Send prompts to the pods for their length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Filter, Scorer, plugin
from proxy.core.request import InferenceRequest

UNLABELLED_SCORE = 0.5


@plugin("context-length-aware")
@dataclass(frozen=True, slots=True)
class ContextLengthAware(Filter, Scorer):
    """Prefers pods whose label `min-max` has the prompt's tokens in its range, narrow ranges and room above first.

    In the range, of width w = max - min: 0.3 + 0.7 * (0.7 / (1 + w / 10000) + 0.3 * (max - tokens) / w), and 1 for
    w = 0. Out of it, at a distance d: 0.3 / (1 + d / 1000). Without the label 0.5, with one that is no range 0.
    """

    label: str = param("llm-d.ai/context-length-range", "label with the range of prompt tokens, as 0-8192")
    enable_filtering: bool = param(False, "drop pods whose range excludes the prompt; pods without the label stay")

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError("label must not be empty")

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if not self.enable_filtering:
            return endpoints
        tokens = request.prompt.tokens
        return [endpoint for endpoint in endpoints if self._admits(endpoint, tokens)]

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        tokens = request.prompt.tokens
        return [self._score(endpoint, tokens) for endpoint in endpoints]

    def _admits(self, endpoint: Endpoint, tokens: int) -> bool:
        text = endpoint.labels.get(self.label)
        if text is None:
            return True
        bounds = parse_range(text)
        return bounds is not None and bounds[0] <= tokens <= bounds[1]

    def _score(self, endpoint: Endpoint, tokens: int) -> float:
        text = endpoint.labels.get(self.label)
        if text is None:
            return UNLABELLED_SCORE
        bounds = parse_range(text)
        return 0.0 if bounds is None else score_in_range(tokens, *bounds)


@lru_cache(maxsize=1024)
def parse_range(text: str) -> tuple[int, int] | None:
    """Return (min, max) of `min-max`; None for any other text."""
    match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if match is None:
        return None
    low, high = int(match[1]), int(match[2])
    return (low, high) if low <= high else None


def score_in_range(tokens: int, low: int, high: int) -> float:
    if not low <= tokens <= high:
        distance = low - tokens if tokens < low else tokens - high
        return 0.3 / (1 + distance / 1000)
    width = high - low
    if width == 0:
        return 1.0
    return 0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * (high - tokens) / width)
