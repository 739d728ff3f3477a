"""One prompt on its way through the engine, and the answer it grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.lab.sim.text import BYTES_PER_TOKEN, Writer, tokens_in


class Finish(Enum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class Phase(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """It has its blocks, and what belongs into them is on its way."""
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer is to be written. `max_tokens` 0 computes the prompt only, as embeddings need."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[bytes, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    eos_probability: float = 0.0
    seed: int = 0
    script: bytes | None = None
    """The answer itself where it is not free text: a tool call."""

    @property
    def held_back(self) -> int:
        """Bytes that are not shown while they may still become a stop string."""
        return max(map(len, self.stop)) - 1 if self.stop else 0


@dataclass(slots=True)
class Progress:
    """What is remembered of a sequence after it ended. Times are those of the engine's clock."""

    prompt_tokens: int
    arrived: float = 0.0
    cached_tokens: int = 0
    external_tokens: int = 0
    """Of the prompt, computed by another pod."""
    generated_tokens: int = 0
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    preemptions: int = 0


class Output(NamedTuple):
    """One token of one sequence. `text` is what may be shown of it: nothing yet while a stop string is possible."""

    sequence: Sequence
    text: bytes
    finish: Finish | None


Listener = Callable[[Output], None]


def _ignore(output: Output) -> None:
    pass


class Transfer:
    """How the KV cache of one prompt comes from another pod, or goes to one: the engine calls, a connector moves. This
    one moves nothing."""

    def arrives(self, cached: int) -> bool:
        """Asked when it is this prompt's turn, of which so many tokens are here: whether the rest comes from
        elsewhere."""
        return False

    def begin(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for the last `tokens` of the prompt are reserved. Ends with `Engine.loaded` or `Engine.fail`."""

    def abandon(self) -> None:
        """The sequence has ended, and its blocks are not kept."""

    def computed(self, sequence: Sequence) -> None:
        """The whole prompt is in the blocks of the sequence, which has written its first token."""

    def keeps(self, sequence: Sequence) -> bool:
        """Asked at an end by length: whether the blocks stay until `Engine.give_back`."""
        return False

    async def done(self) -> None:
        """Before the answer is told to be whole. Raises what has gone wrong."""


NO_TRANSFER = Transfer()


@dataclass(slots=True, eq=False)
class Sequence:
    """Lives from submission to its last token or abort.

    `root` namespaces the prefix cache (model or adapter, cache salt). `adapter` is the LoRA adapter, if any.
    """

    prompt: bytes
    sampling: Sampling
    root: int = 0
    adapter: str | None = None
    media: tuple[int, ...] = ()
    """Hashes of the images and the like in the prompt, which are encoded before it is computed."""
    transfer: Transfer = NO_TRANSFER
    listener: Listener = _ignore
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens whose KV cache is computed."""
    hashed_blocks: int = 0
    """Blocks it holds that are full and known to the prefix cache: the first of `hashes`."""
    open_blocks: int = 0
    """Blocks it holds that are not."""
    hashes: list[int] = field(default_factory=list)
    stop_reason: str | None = None
    finish: Finish | None = None
    progress: Progress = field(init=False)
    tokens: int = field(init=False)
    """Of prompt and answer together."""
    _text: bytearray = field(init=False)
    _shown: int = field(init=False)
    _writer: Writer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._text = bytearray(self.prompt)
        self._shown = len(self.prompt)
        self.tokens = tokens_in(self.prompt)
        self.progress = Progress(prompt_tokens=self.tokens)

    @property
    def answer(self) -> bytes:
        """All text that was shown so far."""
        return bytes(self._text[len(self.prompt) : self._shown])

    def extend_hashes(self, block_size: int) -> None:
        """Hash each block of which all text is known; a block's hash covers all text before it."""
        size = block_size * BYTES_PER_TOKEN
        known = len(self._text) // size
        previous = self.hashes[-1] if self.hashes else self.root
        for index in range(len(self.hashes), known):
            previous = xxh3_64_intdigest(bytes(self._text[index * size : (index + 1) * size]), seed=previous)
            self.hashes.append(previous)

    def grow(self) -> Output:
        """Write the next token."""
        sampling = self.sampling
        if sampling.max_tokens == 0:
            return self._finished(Finish.LENGTH)
        word = self._next_word() if sampling.script is None else self._next_piece(sampling.script)
        self.progress.generated_tokens += 1
        self.tokens += 1
        if word is None:
            return self._finished(Finish.STOP)
        self._text += word
        if sampling.stop and self._stops(len(word)):
            return self._finished(Finish.STOP)
        if sampling.script is not None and self._script_ended(sampling.script):
            return self._finished(Finish.STOP)
        if self.progress.generated_tokens >= sampling.max_tokens:
            return self._finished(Finish.LENGTH)
        return Output(self, self._show(len(self._text) - sampling.held_back), None)

    def _next_word(self) -> bytes | None:
        if self._writer is None:
            self._writer = Writer(self.prompt, self.sampling.seed, self.sampling.eos_probability)
        ignored = self.sampling.ignore_eos or self.progress.generated_tokens < self.sampling.min_tokens
        return self._writer.next_word(may_end=not ignored)

    def _next_piece(self, script: bytes) -> bytes:
        written = len(self._text) - len(self.prompt)
        return script[written : written + BYTES_PER_TOKEN]

    def _script_ended(self, script: bytes) -> bool:
        return len(self._text) - len(self.prompt) >= len(script)

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
