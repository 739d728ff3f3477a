"""Use the exact prefix match where it is reliable, and the approximate one for all other pods and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import DataProducer, PreRequest, plugin, reads
from proxy.core.ports import InstanceName
from proxy.core.request import DataKey, InferenceRequest
from proxy.prefix.match import PREFIX_MATCH, ExactMatch, ExactOrApproxMatch, PrefixMatch


@plugin("exact-or-approx-prefix-cache-producer")
@dataclass
class ExactOrApproxPrefixCacheProducer(DataProducer, PreRequest):
    """Combines exact and approximate prefix matches per pod. A pod is matched exactly while its KV events arrive, none
    was lost since it started, and its responses confirm them. Prompts with media, and prompts of APIs that are not
    tokenised, are matched approximately. Plugins that name no producer of prefix matches use this one."""

    waits: ClassVar[bool] = False

    name: InstanceName
    exact: DataKey[PrefixMatch] = reads(
        PREFIX_MATCH.of("precise-prefix-cache-producer"), "exactProducerName", "producer of exact matches"
    )
    approx: DataKey[PrefixMatch] = reads(
        PREFIX_MATCH.of("approx-prefix-cache-producer"), "approxProducerName", "producer of approximate matches"
    )

    def __post_init__(self) -> None:
        self._key = PREFIX_MATCH.of(self.name)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self._key,)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        state = request.state
        exact, approx = state.read(self.exact), state.read(self.approx)
        match = exact or approx
        if isinstance(exact, ExactMatch) and approx is not None:
            match = ExactOrApproxMatch(exact, approx)
        if match is not None:
            state.write(self._key, match)
            state[PREFIX_MATCH] = match  # The two it is made of have written here before.

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        """Set the predicted cached tokens to the match of this producer, whichever of the three producers ran first."""
        match = attempt.request.state.read(self._key)
        if match is not None:
            (tokens,) = match.lengths((endpoint,))
            attempt.predicted_cached_tokens = tokens
