"""Compute prompts where electricity is cleaner: a decider, all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Decider, plugin
from proxy.core.request import InferenceRequest


@plugin("greener-prefill-decider")
@dataclass(frozen=True, slots=True)
class GreenerPrefillDecider(Decider):
    """Wants long prompts to be computed by a pod whose region has more renewable energy than that of the decode pod."""

    region_label: str = param("region", "label with the pod's region")
    renewable_share: Mapping[str, float] = param({}, "region -> share in [0, 1]")
    prompt_tokens: int = param(1000, "shorter prompts are computed by the decode pod", at_least=0)

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        return request.prompt.tokens >= self.prompt_tokens and self._share(decode) < 1.0

    def confirms(self, request: InferenceRequest, decode: Endpoint, prefill: Sequence[Endpoint]) -> bool:
        return self._share(prefill[0]) > self._share(decode)

    def _share(self, endpoint: Endpoint) -> float:
        return self.renewable_share.get(endpoint.labels.get(self.region_label, ""), 0.0)
