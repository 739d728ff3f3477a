"""Keep the pods that decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import DECODING, Endpoint
from proxy.core.plugin import Filter, plugin
from proxy.core.request import InferenceRequest


@plugin("decode-filter")
@dataclass(frozen=True, slots=True)
class DecodeFilter(Filter):
    """Keeps the roles decode, prefill-decode, both and encode-prefill-decode, and pods without a role."""

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.role in DECODING]
