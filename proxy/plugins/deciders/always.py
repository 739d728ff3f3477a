"""Prefill every prompt on another pod."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Decider, plugin
from proxy.core.request import InferenceRequest


@plugin("always-disagg-pd-decider")
@dataclass(frozen=True, slots=True)
class AlwaysDisaggPdDecider(Decider):
    """Prefills every request on a pod of the prefill profile."""

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        return True
