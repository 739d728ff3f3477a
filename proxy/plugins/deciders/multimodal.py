"""Encode media on another pod."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Decider, plugin
from proxy.core.request import InferenceRequest
from proxy.openai.prompts import has_media


@plugin("always-disagg-multimodal-decider")
@dataclass(frozen=True, slots=True)
class AlwaysDisaggMultimodalDecider(Decider):
    """Runs the encode stage for every request with an image, audio or video."""

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        return has_media(request.body)
