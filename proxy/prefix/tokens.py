"""The sources of token ids: a tokenizer in this process, or a server that has one, such as a pod."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import orjson

from proxy import outbound
from proxy.core.endpoint import Endpoint
from proxy.core.errors import without_extra
from proxy.core.ports import LocalModel, PromptTokenizer, RemoteTokenizer, Tokenizers
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import Draft
from proxy.prefix.chat import Uncertain, refuse_what_steers
from proxy.prefix.hashing import packed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenSource(Tokenizers):
    """`wall` is the time that templates may render. Opened resources belong to the plugin that requested them."""

    wall: Callable[[], float]
    draft: Draft = field(compare=False)

    def local(self, model: LocalModel) -> PromptTokenizer:
        try:
            from proxy.prefix.tokenizer import LocalTokens  # needs an extra
        except ImportError as error:
            raise without_extra("", "precise", error.name or "") from None
        return self.draft.get(object(), lambda: LocalTokens(model, self.wall))

    def remote(self, tokenizer: RemoteTokenizer) -> PromptTokenizer:
        return self.draft.get(object(), lambda: RemoteTokens(tokenizer))


PATHS = ("/v1/chat/completions", "/v1/completions")

LARGE = 256 * 1024
"""Bytes of a body that may be parsed here, in a millisecond."""

_MEDIA = (b'"image', b'"input_image', b'"input_audio', b'"audio', b'"video', b'"prompt_embeds')
"""Media become tokens only when they are decoded, which no server does for this request."""


class RemoteTokens(PromptTokenizer):
    """Requests token ids from a server. The body is sent unchanged, because both APIs have the same field names. The
    session opens with the first request and ends with `async with`."""

    def __init__(self, tokenizer: RemoteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._session: aiohttp.ClientSession | None = None

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        try:
            question = self._question(request)
        except Uncertain as reason:
            log.debug("did not tokenise a prompt: %s", reason)
            return None
        server = self._server(request.path, endpoints)
        if server is None:
            return None
        url, key = server
        try:
            response = await self._ask(url, key, question)
        except (*outbound.FAILURES, orjson.JSONDecodeError) as error:
            log.debug("%s did not tokenise a prompt: %r", url, error)
            return None
        ids = _ids(response)
        return Prompt((packed(ids),), request.prompt.salt) if ids else None

    async def __aenter__(self) -> RemoteTokens:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    def _server(self, path: str, endpoints: Sequence[Endpoint]) -> tuple[str, str | None] | None:
        """Return the URL of the tokeniser and its key; of pods, the one with the fewest requests."""
        if self._tokenizer.url:
            return f"{self._tokenizer.url.rstrip('/')}{path}/render", None
        if not endpoints:
            return None
        pod = min(endpoints, key=lambda endpoint: endpoint.load.requests)
        return f"{pod.url}/tokenize", pod.api_key

    def _question(self, request: InferenceRequest) -> bytes:
        body, name = request.body, self._tokenizer.model
        if request.path not in PATHS or not body or len(request.prompt.parts) != 1:
            raise Uncertain(request.path)
        if any(medium in body for medium in _MEDIA):
            raise Uncertain("media")
        if len(body) > LARGE:
            if b'"reasoning_effort"' in body or b'"truncate_prompt_tokens"' in body or (name and name != request.model):
                raise Uncertain("a large body")
            return body
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise Uncertain("the body") from None
        refuse_what_steers(fields)
        if fields.get("reasoning_effort") is not None or not isinstance(fields.get("prompt", ""), str):
            raise Uncertain("what a question cannot say")
        return orjson.dumps({**fields, "model": name}) if name and name != request.model else body

    async def _ask(self, url: str, key: str | None, body: bytes) -> object:
        session = self._session = self._session or outbound.session(self._tokenizer.timeout)
        headers = {"content-type": "application/json", **outbound.bearer(key)}
        response = await outbound.send(session, "POST", url, data=body, headers=headers, raise_for_status=True)
        return orjson.loads(response.body)


def _ids(response: object) -> list[int] | None:
    """Return the token ids of a response: in `tokens`, in `token_ids`, or in a list with one object of the latter."""
    if isinstance(response, list) and len(response) == 1:
        response = response[0]
    ids = (response.get("tokens") or response.get("token_ids")) if isinstance(response, dict) else None
    return ids if isinstance(ids, list) and all(type(one) is int and 0 <= one < 1 << 32 for one in ids) else None
