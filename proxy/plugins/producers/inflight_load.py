"""Estimate the length of a response, so that it counts as load until its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import OUTPUT_ESTIMATE, DataKey, InferenceRequest
from proxy.prefix.match import PrefixMatch, requires_prefix_match


@plugin("inflight-load-producer")
@dataclass(frozen=True, slots=True)
class InflightLoadProducer(DataProducer):
    """Estimates the length of responses: prompt tokens * outputRatio, at most the client's limit and
    `maxEstimatedOutputTokens`. Requests and prompt tokens in flight are counted without this plugin too."""

    waits: ClassVar[bool] = False

    name: InstanceName
    add_estimated_output_tokens: bool = param(
        False, "count the estimated tokens as in flight until the response has ended"
    )
    output_ratio: float = param(1.5, "completion tokens per prompt token", at_least=0)
    max_estimated_output_tokens: int | None = param(None, "largest estimate of completion tokens", at_least=0)
    match: DataKey[PrefixMatch] = requires_prefix_match()
    sync_cross_replica_state: bool = param(
        True, "accepted and without effect: proxies with a store always count each other's requests"
    )

    @property
    def provides(self) -> tuple[DataKey[int], ...]:
        return (OUTPUT_ESTIMATE.of(self.name),)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        if self.add_estimated_output_tokens:
            request.state.write(self.provides[0], self.estimate(request.prompt.tokens, request.max_tokens))

    def estimate(self, prompt_tokens: int, max_tokens: int) -> int:
        limits = [limit for limit in (max_tokens or None, self.max_estimated_output_tokens) if limit is not None]
        return min([round(prompt_tokens * self.output_ratio), *limits])
