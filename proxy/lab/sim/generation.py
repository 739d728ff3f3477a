"""The sequences of one request, and the stream of its response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from proxy.lab.sim import fields
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.fields import (
    ENGINE_FAILED,
    Json,
    SimError,
    internal,
    media_in,
    too_long,
)
from proxy.lab.sim.http import EventStream, SimRequest
from proxy.lab.sim.sequence import Finish, Listener, Output, SamplingParams, Sequence, cache_root, text_hash, tokens_in
from proxy.lab.sim.transfer import TransferRequest

RANKED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})

DEFAULT_MAX_TOKENS = 16
"""vLLM's default."""


@dataclass(frozen=True, slots=True)
class SimUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """Cached prompt tokens; None if the pod does not report them."""

    def as_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens},
        }


class Writer:
    """The renderer of one stream."""

    def open(self) -> None:
        """Write the events before the first token."""

    def write_output(self, output: Output) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Generation:
    """The sequences of one request. `listener` receives each token; set it before they start."""

    def __init__(self, request: SimRequest, sequences: Items[Sequence], choices: int = 1) -> None:
        self.sequences = sequences
        self.listener: Listener | None = None
        for sequence in sequences:
            sequence.listener = self._receive
        self._service = request.service
        self._choices = choices
        self._failed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Done when all sequences have ended."""
        self._request = request

    def submit(self) -> None:
        """Start the sequences; they continue after the request has ended."""
        self._request.record.sequences = [sequence.progress for sequence in self.sequences]
        self._request.record.rank = self.sequences[0].rank
        self._service.driver.submit(self.sequences)

    def _receive(self, output: Output) -> None:
        if output.finish is Finish.ERROR:
            self.stop(failed=True)
            return
        if self.listener is not None:
            self.listener(output)
        if output.finish and all(sequence.finish for sequence in self.sequences):
            self.stop()

    def stop(self, *, failed: bool = False) -> None:
        self._service.driver.abort(self.sequences)
        if not self._failed.done():
            self._failed.set_result(failed)

    async def run(self) -> None:
        """Run the sequences and wait until their transfers are complete, too. Raise SimError if the engine fails."""
        self.submit()
        try:
            if await self._failed:
                raise internal(ENGINE_FAILED)
            for sequence in self.sequences:
                await sequence.transfer.done()
        finally:
            self._service.driver.abort(self.sequences)

    async def streamed(self, writer: Callable[[EventStream], Writer]) -> web.StreamResponse:
        async with EventStream(self._request) as stream:
            events = writer(stream)
            self.listener = events.write_output
            events.open()
            await self.run()
            events.close()
        return stream.response

    @property
    def kv_transfer_params(self) -> Json | None:
        return self._service.connector.params(self.sequences)

    @property
    def ec_transfer_params(self) -> Json | None:
        return self._service.embeddings.params(self.sequences)

    @property
    def usage(self) -> SimUsage:
        """Return the usage; a prompt counts once, independently of the number of choices."""
        firsts = [sequence.progress for sequence in self.sequences[:: self._choices]]
        return SimUsage(
            prompt_tokens=sum(progress.prompt_tokens for progress in firsts),
            completion_tokens=sum(sequence.progress.generated_tokens for sequence in self.sequences),
            cached_tokens=sum(p.cached_tokens for p in firsts) if self._service.config.prompt_tokens_details else None,
        )


def generation(
    request: SimRequest, model: str, prompts: Items[bytes], sampling: SamplingParams, body: Json
) -> Generation:
    """Return a generation of every prompt times `n`, checked against the engine's limits; on an encode pod only of the
    prompt's media."""
    service, transfer = request.service, TransferRequest(request.id, body, request.fault)
    media = service.embeddings.missing(media_in(body), body)
    if service.config.role == "encode":
        if not media:
            raise SimError("This instance encodes images, video and audio, and the request has none.")
        placeholder = Sequence(b" enc", SamplingParams(max_tokens=1), media=media)
        service.embeddings.keep(placeholder, is_lost=transfer.is_lost)
        return Generation(request, [placeholder])
    choices = fields.positive(body, "n", 1)
    root = cache_root(model, fields.cache_salt(body))
    adapter = None if model == service.config.model else model
    for prompt in prompts:
        if (tokens := tokens_in(prompt)) >= service.config.context_length:
            raise too_long(tokens, service.config.context_length)
    rank = _named_rank(service.config, request, body)
    sequences = [
        Sequence(prompt, _for_choice(service.config, sampling, prompt, choice), root, adapter, media)
        for prompt in prompts
        for choice in range(choices)
    ]
    service.driver.place(sequences, rank)
    service.connector.arrange(transfer, sequences)
    return Generation(request, sequences, choices)


def _named_rank(config: SimConfig, request: SimRequest, body: Json) -> int | None:
    """Return the data-parallel rank that the request names; None leaves the choice to the internal balancer. vLLM
    reads the header of chat and text completions and of Messages, ignores it on all other paths, and ignores a value
    that is not a number. SGLang reads the header on all paths, then the body. Raise SimError for a rank that does
    not exist."""
    if config.ignore_rank:
        return None
    named: Any = request.web_request.headers.get("X-data-parallel-rank")
    if config.connector == "sglang":
        named = named or body.get("routed_dp_rank", body.get("data_parallel_rank"))
    elif request.web_request.path not in RANKED_PATHS:
        return None
    try:
        rank = int(named)
    except (TypeError, ValueError):
        return None
    if not 0 <= rank < config.data_parallel_size:
        raise SimError(f"data_parallel_rank {rank} is out of range [0, {config.data_parallel_size}).")
    return rank


def _for_choice(config: SimConfig, sampling: SamplingParams, prompt: bytes, choice: int) -> SamplingParams:
    """Return the sampling of one choice: it ends at the end of the context, and every choice has a different text."""
    left = config.context_length - tokens_in(prompt)
    return replace(
        sampling,
        max_tokens=min(sampling.max_tokens, left),
        seed=config.seed + choice,
        script=sampling.script or (config.responses.get(text_hash(prompt)) if config.responses else None),
    )


def sampling_of(body: Json, limit: str = "max_tokens") -> SamplingParams:
    """Return the sampling parameters of a body. `limit` is the name of the field with the largest number of response
    tokens."""
    fields.check_temperature(body)
    fields.integer(body, "priority", 0)
    fields.flag(body, "ignore_eos")
    return SamplingParams(
        max_tokens=fields.positive(body, limit, DEFAULT_MAX_TOKENS),
        min_tokens=fields.integer(body, "min_tokens", 0),
        stop=tuple(stop.encode() for stop in fields.strings(body, "stop") if stop),
        include_stop=fields.flag(body, "include_stop_str_in_output"),
    )


def response_head(request: SimRequest, kind: str, object: str, model: str) -> Json:
    """Return the fields that every chunk of a stream and every non-streamed response contain."""
    created = int(request.service.driver.wall())
    return {"id": f"{kind}-{request.id}", "object": object, "created": created, "model": model}
