"""Streamed chunks of chat and text completions, most of whose bytes are known before the first token."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.errors import BadRequest, invalid
from proxy.lab.sim.api.generation import FINGERPRINT, Generation
from proxy.lab.sim.api.stream import DONE, EventStream
from proxy.lab.sim.sequence import Output


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage: bool = False

    @classmethod
    def of(cls, body: fields.Body) -> StreamOptions:
        options = body.get("stream_options")
        if options is None:
            return cls()
        if not body.get("stream"):
            message = "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
            raise BadRequest(message, "stream_options")
        if not isinstance(options, dict):
            raise invalid("model_attributes_type", "body.stream_options", "Input should be a valid dictionary", options)
        include = fields.flag(options, "include_usage")
        return cls(include, include and fields.flag(options, "continuous_usage_stats"))


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of a stream begins with."""

    id: str
    object: str
    created: int
    model: str

    def opened(self) -> bytes:
        """An object that is still open, without the braces' end."""
        fields = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return b"data: " + orjson.dumps(fields)[:-1]


def quoted(text: bytes) -> bytes:
    """As a JSON string."""
    return orjson.dumps(text.decode())


class ChunkWriter:
    """Writes the chunks of one stream; the subclass knows what one token looks like."""

    def __init__(self, stream: EventStream, head: Head, options: StreamOptions, generation: Generation) -> None:
        self._stream = stream
        self._opened = head.opened()
        self._options = options
        self._generation = generation
        self._index = {sequence: index for index, sequence in enumerate(generation.sequences)}
        self._tails = {False: self._tail(fingerprint=False), True: self._tail(fingerprint=not options.include_usage)}

    def _tail(self, *, fingerprint: bool) -> bytes:
        return b',"system_fingerprint":"%b"}\n\n' % FINGERPRINT.encode() if fingerprint else b"}\n\n"

    def index_of(self, output: Output) -> int:
        return self._index[output.sequence]

    def write(self, choice: bytes, output: Output, *, opening: bool = False) -> None:
        """Send one chunk with one choice; an opening one stands before the first token."""
        tokens = 0 if opening else output.sequence.progress.generated_tokens
        tail = self._tails[output.finish is not None and not opening]
        self._stream.send(b'%b,"choices":[%b]%b%b' % (self._opened, choice, self._usage_so_far(output, tokens), tail))

    def _usage_so_far(self, output: Output, tokens: int) -> bytes:
        if not self._options.continuous_usage:
            return b""
        prompt = output.sequence.progress.prompt_tokens
        return (
            b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}'
            % (prompt, prompt + tokens, tokens)
        )

    def close(self) -> None:
        """The usage if it was asked for, and the terminal event."""
        if self._options.include_usage:
            usage = orjson.dumps(self._generation.usage.as_json())
            tail = self._tail(fingerprint=True)
            self._stream.send(b'%b,"choices":[],"usage":%b%b' % (self._opened, usage, tail))
        self._stream.send(DONE)
