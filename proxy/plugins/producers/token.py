"""Produce the tokens of a prompt: an estimate, or exactly the engine's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration, param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import ContentFormat, InstanceName, LocalModel, PromptTokenizer, RemoteTokenizer, Tokenizers
from proxy.core.request import DataKey, InferenceRequest, Prompt
from proxy.prefix.match import TOKEN_IDS, TOKENIZED_PROMPT

POD_TIMEOUT = 0.3
"""Seconds for a pod to tokenise a prompt. All producers of a request share 0.4 s."""


@dataclass(frozen=True, slots=True)
class Local:
    """Tokenises in this process, with the model's own tokenizer and chat template."""

    model: str = param(doc="directory with tokenizer.json, or a model id in the local cache of Hugging Face")
    chat_template: str = param("", "file with a Jinja template that replaces the model's own")
    content_format: ContentFormat = param(
        "auto", "content format of messages, as --chat-template-content-format of the engine"
    )
    chat_template_kwargs: Mapping[str, Any] = param(
        {}, "arguments of the template, as --default-chat-template-kwargs of the engine"
    )
    exclude_tools_when_tool_choice_none: bool = param(False, "as the flag of this name of the engine")


@dataclass(frozen=True, slots=True)
class Server:
    """Requests token ids from a server that renders prompts, at /v1/completions/render and
    /v1/chat/completions/render."""

    url: str = param("http://localhost:8000", "base URL of a vLLM server with --enable-scale-out", aliases=("http",))
    timeout: Duration = param(Duration(5.0), "timeout of one request; all producers together have 0.4 s", more_than=0)
    mm_timeout: Duration = param(Duration(30.0), "accepted and without effect: prompts with media are not sent")
    endpoint_discovery: Mapping[str, Any] | None = param(
        None, "request token ids from the pods instead, as the mode pod; its fields have no effect"
    )
    messages_render_mode: str = param("", "accepted and without effect: messages of Anthropic's API are estimated")
    prefill_only: bool = param(False, "accepted and without effect: no limit of the response is sent")


@dataclass(frozen=True, slots=True)
class Pod:
    """By one of the pods, at /tokenize."""


@plugin("token-producer")
@dataclass
class TokenProducer(DataProducer):
    """Produces the token ids of prompts in one of the modes; without a mode it estimates their number: four bytes of
    the text that the chat template sees are one token. Chats, completions and lists of token ids are supported.
    Where the tokens of a prompt are uncertain, for example because of media, they are estimated."""

    name: InstanceName
    tokenizers: Tokenizers
    local: Local | None = param(None, "mode that tokenises in this process; needs the extra kvlane[precise]")
    pod: Pod | None = param(None, "mode that requests token ids from the pods")
    vllm: Server | None = param(None, "mode that requests token ids from a server")
    estimate: Mapping[str, Any] = param({}, "default mode, without settings; media count with fixed estimates")
    uds: Any = param(None, "as pod: there is no tokenizer behind a Unix socket", aliases=("udsTokenizerConfig",))
    model_name: str = param(
        "", "model name for pod and vllm; empty: the model of the request. Without a mode it means pod"
    )
    models: tuple[str, ...] = param((), "models whose prompts are tokenised in this mode; empty: all")

    def __post_init__(self) -> None:
        """Raise ValueError for modes that contradict each other or are unavailable."""
        given = [mode for mode in ("local", "pod", "vllm", "uds") if getattr(self, mode) is not None]
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

    def _opened(self) -> PromptTokenizer | None:
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
        if self.vllm is not None and self.vllm.endpoint_discovery is None:
            return self.tokenizers.remote(RemoteTokenizer(self.vllm.url, self.model_name, self.vllm.timeout))
        by_pods = self.pod is not None or self.uds is not None or self.vllm is not None
        if by_pods or (self.model_name and not self.estimate):
            return self.tokenizers.remote(RemoteTokenizer("", self.model_name, POD_TIMEOUT))
        return None
