"""How prompts become the token ids that an engine would make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ContentFormat = Literal["auto", "string", "openai"]
"""How a template wants the content of messages: as one text, or in parts."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`model` is a folder with tokenizer.json, or an id that the local cache of Hugging Face has; `chat_template` a
    file that stands in for the model's own."""

    model: str
    chat_template: str = ""
    content_format: ContentFormat = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_not_chosen: bool = False
    cache_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """`url` is a server that renders prompts, empty: any of the pods, at their /tokenize; `model` what it calls the
    model, empty: as the request does. `timeout` is in seconds."""

    url: str = ""
    model: str = ""
    timeout: float = 5.0
