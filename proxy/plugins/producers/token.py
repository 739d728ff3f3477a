"""The prompt in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import InstanceName
from proxy.core.request import InferenceRequest, Prompt
from proxy.prefix.keys import TOKENIZED_PROMPT


@plugin("token-producer")
@dataclass(frozen=True, slots=True)
class TokenProducer(DataProducer):
    """Estimates: four bytes of what the chat template will see are one token."""

    waits: ClassVar[bool] = False

    name: InstanceName
    estimate: Mapping[str, Any] = param({}, "the mode; it has nothing to set: media count with fixed estimates")
    vllm: Any = param(None, "not yet supported")
    uds: Any = param(None, "not yet supported")
    model_name: str = param("", "of the modes vllm and uds, which are not yet supported")

    def __post_init__(self) -> None:
        for mode in ("vllm", "uds"):
            if getattr(self, mode) is not None:
                raise ValueError(f"the mode '{mode}' is not yet supported; leave it out to estimate")
        if self.model_name:
            raise ValueError("modelName belongs to the modes vllm and uds, which are not yet supported")
        if self.estimate:
            keys = ", ".join(map(str, self.estimate))
            raise ValueError(f"estimate.{keys} would have no effect: media count with fixed estimates; leave it out")

    @property
    def provides(self) -> tuple[DataKey[Prompt], ...]:
        return (TOKENIZED_PROMPT.of(self.name),)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        request.state.write(self.provides[0], request.prompt)
