"""The prompt in tokens: estimated, or exactly as the engine would make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration, param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import ContentFormat, InstanceName, LocalModel, RemoteTokenizer, Tokenizers, Tokens
from proxy.core.request import DataKey, InferenceRequest, Prompt
from proxy.prefix.match import TOKEN_IDS, TOKENIZED_PROMPT

POD_TIMEOUT = 0.3
"""Seconds for a pod to tokenise a prompt. All producers of a request share 0.4 s."""


@dataclass(frozen=True, slots=True)
class Local:
    """Here, by the model's own tokenizer and chat template."""

    model: str = param(doc="folder with tokenizer.json, or a model id that the local cache of Hugging Face has")
    chat_template: str = param("", "file with a Jinja template, in place of the model's own")
    content_format: ContentFormat = param("auto", "of messages, as the engine's --chat-template-content-format")
    chat_template_kwargs: Mapping[str, Any] = param({}, "as the engine's --default-chat-template-kwargs")
    exclude_tools_when_tool_choice_none: bool = param(False, "as the engine's flag of this name")


@dataclass(frozen=True, slots=True)
class Server:
    """By a server that renders prompts, at /v1/completions/render and /v1/chat/completions/render."""

    url: str = param("http://localhost:8000", "base URL of a vLLM server with --enable-scale-out")
    timeout: Duration = param(Duration(5.0), "for a response; all producers together have 0.4 s", more_than=0)
    mm_timeout: Duration = param(Duration(30.0), "accepted and without effect: prompts with media are not asked for")


@dataclass(frozen=True, slots=True)
class Pod:
    """By one of the pods, at /tokenize."""


@plugin("token-producer")
@dataclass(slots=True)
class TokenProducer(DataProducer):
    """Makes token ids of prompts in the mode that is given; without one it estimates: four bytes of what the chat
    template will see are one token. Chats, completions and token ids are known; where it is not certain what the engine
    would make of a prompt, because of media, say, its tokens are estimated."""

    name: InstanceName
    tokenizers: Tokenizers
    local: Local | None = param(None, "the mode that needs kvlane[precise]")
    pod: Pod | None = param(None, "the mode that asks the pods")
    vllm: Server | None = param(None, "the mode that asks a server")
    estimate: Mapping[str, Any] = param({}, "the default mode; it has nothing to set: media count with fixed estimates")
    uds: Any = param(None, "not supported: use local")
    model_name: str = param("", "what pod and vllm call the model; empty: as the request does")
    models: tuple[str, ...] = param((), "models whose prompts are tokenised so; empty: all")
    _tokens: Tokens | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError for modes that contradict each other or are unavailable."""
        given = [mode for mode in ("local", "pod", "vllm") if getattr(self, mode) is not None]
        if self.uds is not None:
            raise ValueError("the mode 'uds' is not supported; use local")
        if len(given) > 1:
            raise ValueError(f"the modes {' and '.join(given)} exclude each other")
        self._tokens = self._opened()

    @property
    def waits(self) -> bool:  # type: ignore[override]  # it depends on the mode
        return self._tokens is not None

    @property
    def provides(self) -> tuple[DataKey[Prompt], ...]:
        tokenized = TOKENIZED_PROMPT.of(self.name)
        return (tokenized,) if self._tokens is None else (tokenized, TOKEN_IDS.of(self.name))

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        prompt, state = None, request.state
        if self._tokens is not None and (not self.models or request.model in self.models):
            prompt = await self._tokens.of(request, endpoints)
        if prompt is not None:
            state.write(TOKEN_IDS.of(self.name), prompt)
        state.write(TOKENIZED_PROMPT.of(self.name), prompt or request.prompt)

    def _opened(self) -> Tokens | None:
        if self.local is not None:
            mode = self.local
            return self.tokenizers.local(
                LocalModel(
                    mode.model,
                    mode.chat_template,
                    mode.content_format,
                    mode.chat_template_kwargs,
                    mode.exclude_tools_when_tool_choice_none,
                )
            )
        if self.pod is not None:
            return self.tokenizers.remote(RemoteTokenizer("", self.model_name, POD_TIMEOUT))
        if self.vllm is not None:
            return self.tokenizers.remote(RemoteTokenizer(self.vllm.url, self.model_name, self.vllm.timeout))
        return None
