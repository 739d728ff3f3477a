"""A prompt on its way through the engine, and the response that the engine generates."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import orjson
from xxhash import xxh3_64, xxh3_64_intdigest

BYTES_PER_TOKEN = 4

WORDS = tuple(
    b" " + word
    for word in (
        b"air all and any arm art ask bay bed big box boy bus can car cat "
        b"cup day dog ear eat egg end eye far few fly for fun gap get hat "
        b"ice ink jar job joy key lab law leg let low map may net new now "
        b"oak old one our own pan pen red run sea see sky sun the two way"
    ).split()
)
"""64 words of one token each. With the space they have four bytes, so that text and tokens convert in both
directions."""


def tokens_in(text: bytes | bytearray) -> int:
    return -(-len(text) // BYTES_PER_TOKEN)


VOCABULARY = 1 << 32


def render_chat(
    messages: Iterable[Mapping[str, Any]], tools: Items[object] = (), *, continue_final_message: bool = False
) -> bytes:
    """Apply the chat template: tools, then each message with its role, then the head of the response. A final message
    that is to be continued has no end marker, and its text is the beginning of the response."""
    parts = [f"<|tools|>{orjson.dumps(tools).decode()}\n"] if tools else []
    for message in messages:
        calls = orjson.dumps(message["tool_calls"]).decode() if message.get("tool_calls") else ""
        parts.append(f"<|{message.get('role', 'user')}|>{flatten(message.get('content'))}{calls}\n")
    if continue_final_message:
        parts[-1] = parts[-1][:-1]
    else:
        parts.append("<|assistant|>")
    return "".join(parts).encode(errors="replace")


def flatten(content: object) -> str:
    """Return the text of a message's content: a string, or parts; a part without text counts as its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(flatten, content))
    if isinstance(content, dict) and isinstance(content.get("text"), str):
        return str(content["text"])
    return orjson.dumps(content).decode()


def from_token_ids(ids: Items[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def token_ids(text: bytes) -> list[int]:
    padded = text + b"\0" * (-len(text) % BYTES_PER_TOKEN)
    return list(struct.unpack(f"<{len(padded) // BYTES_PER_TOKEN}I", padded))


def text_hash(prompt: bytes) -> int:
    return xxh3_64_intdigest(prompt)


def cache_root(model: str, salt: str | None) -> int:
    """Return the start of the hash chains of a model (or adapter) and salt: two different ones share no block."""
    return xxh3_64_intdigest(f"{model}\0{salt or ''}".encode())


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """It has its blocks, and their content is being transferred."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of one response. `max_tokens` 0 computes only the prompt, for embeddings."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[bytes, ...] = ()
    include_stop: bool = False
    seed: int = 0
    script: bytes | None = None
    """The text of a response that is not free text: a tool call."""


@dataclass(slots=True)
class SequenceProgress:
    """The data that is kept of a sequence after its end. Times are on the engine's clock."""

    prompt_tokens: int
    arrived: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0
    """Prompt tokens that another pod computed."""
    generated_tokens: int = 0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    preemptions: int = 0


class Output(NamedTuple):
    """One token of one sequence. `text` is the text that may be sent: empty while a stop string is possible."""

    sequence: Sequence
    text: bytes
    finish: Finish | None


Listener = Callable[[Output], None]


class SequenceTransfer:
    """The transfer of the KV cache of one prompt from or to another pod. The engine calls it, and a connector moves the
    data. This class moves nothing."""

    def arrives(self, cached: int) -> bool:
        """Return whether the uncached part of the prompt comes from another pod."""
        return False

    def start(self, sequence: Sequence, tokens: int) -> None:
        """Start to fill the blocks that are reserved for the last `tokens` of the prompt. It ends with
        `SimEngine.loaded` or `SimEngine.fail`."""

    def abandon(self) -> None:
        """Handle the end of the sequence, whose blocks are not kept."""

    def computed(self, sequence: Sequence) -> None:
        """Handle the end of prefill: the whole prompt is in the blocks of the sequence, and the first token is
        generated."""

    def keeps(self, sequence: Sequence) -> bool:
        """Return whether the blocks are kept until `SimEngine.give_back`; called at an end by length."""
        return False

    async def done(self) -> None:
        """Wait until the response may end. Raise SimError."""


NO_TRANSFER = SequenceTransfer()


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence, from submission to its last token or abort. `root` is the namespace in the prefix cache (model or
    adapter, cache salt). `adapter` is the LoRA adapter, if any."""

    prompt: bytes
    sampling: SamplingParams
    root: int = 0
    adapter: str | None = None
    media: tuple[int, ...] = ()
    """Hashes of the images and other media in the prompt, which are encoded before the prompt is computed."""
    rank: int = 0
    """The data-parallel rank of the pod that computes it."""
    transfer: SequenceTransfer = NO_TRANSFER
    listener: Listener = lambda output: None
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Number of tokens whose KV cache is computed."""
    hashed_blocks: int = 0
    """Number of its blocks that are full and in the prefix cache: the first of `hashes`."""
    open_blocks: int = 0
    """Number of its other blocks."""
    hashes: list[int] = field(default_factory=list)
    stop_reason: str | None = None
    finish: Finish | None = None
    progress: SequenceProgress = field(init=False)
    tokens: int = field(init=False)
    """The number of tokens of prompt and response together."""
    _text: bytearray = field(init=False)
    _shown: int = field(init=False)
    _hash: xxh3_64 | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._text = bytearray(self.prompt)
        self._shown = len(self.prompt)
        self.tokens = tokens_in(self.prompt)
        self.progress = SequenceProgress(prompt_tokens=self.tokens)

    @property
    def response(self) -> bytes:
        """The text that was sent so far."""
        return bytes(self._text[len(self.prompt) : self._shown])

    def extend_hashes(self, block_size: int) -> None:
        """Hash each block whose text is complete; a block's hash covers all text before it."""
        size = block_size * BYTES_PER_TOKEN
        known = len(self._text) // size
        previous = self.hashes[-1] if self.hashes else self.root
        for index in range(len(self.hashes), known):
            previous = xxh3_64_intdigest(bytes(self._text[index * size : (index + 1) * size]), seed=previous)
            self.hashes.append(previous)

    def block_tokens(self, index: int, block_size: int) -> list[int]:
        size = block_size * BYTES_PER_TOKEN
        return token_ids(bytes(self._text[index * size : (index + 1) * size]))

    def grow(self) -> Output:
        sampling = self.sampling
        if sampling.max_tokens == 0:
            return self._finished(Finish.LENGTH)
        written = len(self._text) - len(self.prompt)
        word = sampling.script[written:][:BYTES_PER_TOKEN] if sampling.script is not None else self._next_word()
        self.progress.generated_tokens += 1
        self.tokens += 1
        self._text += word
        if sampling.stop and self._stops(len(word)):
            return self._finished(Finish.STOP)
        if sampling.script is not None and written + len(word) >= len(sampling.script):
            return self._finished(Finish.STOP)
        if self.progress.generated_tokens >= sampling.max_tokens:
            return self._finished(Finish.LENGTH)
        held_back = max(map(len, sampling.stop)) - 1 if sampling.stop else 0  # may become a stop string
        return Output(self, self._show(len(self._text) - held_back), None)

    def _next_word(self) -> bytes:
        """Return the next word, which depends on the text before it and the seed."""
        if self._hash is None:
            self._hash = xxh3_64(self.prompt, seed=self.sampling.seed)
        word = WORDS[self._hash.intdigest() & 63]
        self._hash.update(word)
        return word

    def _stops(self, new: int) -> bool:
        """Cut the text at the earliest stop string that ends in its last `new` bytes."""
        if self.progress.generated_tokens <= self.sampling.min_tokens:
            return False
        found = [(at, stop) for stop in self.sampling.stop if (at := self._find(stop, new)) >= 0]
        if not found:
            return False
        at, stop = min(found)
        del self._text[at + len(stop) if self.sampling.include_stop else at :]
        self.stop_reason = stop.decode()
        return True

    def _find(self, stop: bytes, new: int) -> int:
        return self._text.find(stop, max(len(self.prompt), len(self._text) - new - len(stop) + 1))

    def _finished(self, finish: Finish) -> Output:
        self.finish = finish
        return Output(self, self._show(len(self._text)), finish)

    def _show(self, end: int) -> bytes:
        if end <= self._shown:
            return b""
        shown = bytes(self._text[self._shown : end])
        self._shown = end
        return shown
