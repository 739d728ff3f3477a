"""Keep the pods that prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import PREFILLING, Endpoint
from proxy.core.plugin import Filter, plugin
from proxy.core.request import InferenceRequest


@plugin("prefill-filter")
@dataclass(frozen=True, slots=True)
class PrefillFilter(Filter):
    """Keeps the roles prefill, encode-prefill, prefill-decode, both and encode-prefill-decode."""

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.role in PREFILLING]
