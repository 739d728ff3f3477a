"""The `pods.kubernetes` section: which pods of a cluster are wanted, and what each of them is like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.core.params import param
from proxy.fleet.dialects import DEFAULT_ENGINE, Engine
from proxy.kubernetes.access import Access

_KEY = r"(?:[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-\w.]*[A-Za-z0-9])?)?"
_SET = rf"\(\s*{_VALUE}(?:\s*,\s*{_VALUE})*\s*\)"
_REQUIREMENT = rf"\s*(?:!?\s*{_KEY}|{_KEY}\s*(?:==?|!=)\s*{_VALUE}|{_KEY}\s+(?:not)?in\s*{_SET})\s*"
_SELECTOR = re.compile(rf"{_REQUIREMENT}(?:,{_REQUIREMENT})*")


@dataclass(frozen=True, slots=True)
class KubernetesSettings(Access):
    """A pod for every ready pod of a cluster that is not about to end; those that end are drained. What labels and
    annotations of a pod say goes before what stands here."""

    selector: str = param("", "of labels: the pods themselves, or those whose labels count where a service says who")
    service: str = param("", "whose EndpointSlices say which pods there are")
    inference_pool: str = param("", "InferencePool whose selector and target ports say it")
    ports: tuple[int, ...] = param(
        (), "of every pod, each a pod of its own; those of the service or InferencePool unless given, else 8000"
    )
    scheme: Literal["http", "https"] = param("http", "of every pod's URL")
    role: str = param("", "of pods without a label llm-d.ai/role")
    labels: Mapping[str, str] = param({}, "of every pod, beside its own")
    weight: float = param(1.0, "of pods without an annotation kvlane/weight", more_than=0)
    models: tuple[str, ...] = param((), "of pods without an annotation kvlane/models; they are asked unless given")
    engine: Engine = param(DEFAULT_ENGINE, "of pods without a label llm-d.ai/engine-type")
    api_key: str | None = param(None, "of every pod")

    def __post_init__(self) -> None:
        """Raises ValueError for what names no pods, or several sets of them."""
        Access.__post_init__(self)
        if not (self.selector or self.service or self.inference_pool):
            raise ValueError("names no pods; write a selector, a service or an inferencePool")
        if self.inference_pool and (self.selector or self.service):
            raise ValueError("an inferencePool has a selector of its own; take selector and service out")
        if self.selector and not _SELECTOR.fullmatch(self.selector):
            raise ValueError(f"selector: {self.selector!r} is none; write app=vllm, tier in (a, b), !canary")
        if any(not 0 < port < 65536 for port in self.ports) or len(set(self.ports)) < len(self.ports):
            raise ValueError("ports: must be different ones from 1 to 65535")
