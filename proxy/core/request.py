"""What a client wants: parsed once at the edge, frozen from there on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from proxy.core.cycle_state import CycleState, DataKey
from proxy.core.frozen import frozen

BYTES_PER_TOKEN = 4
"""One token counts as four bytes of prompt, wherever a tokenizer is not asked."""


@frozen
class Prompt:
    """What the engine's chat template will see, in its order: tools, then messages with their roles.

    `parts` has one entry per prompt of a batch. Text is UTF-8, token ids are packed as little-endian 32-bit integers,
    an image is its digest repeated over the tokens it will take: so four bytes are one token throughout.
    `salt` is the request's cache_salt.
    """

    parts: tuple[bytes, ...] = ()
    salt: str = ""
    tokens: int = field(init=False, compare=False)
    """Estimated tokens of all parts."""

    def __init__(self, parts: tuple[bytes, ...] = (), salt: str = "", tokens: int = 0) -> None:
        """`tokens` are to be given if `parts` are only a beginning."""
        self.parts = parts  # type: ignore[misc]
        self.salt = salt  # type: ignore[misc]
        self.tokens = tokens or sum([-(-len(part) // BYTES_PER_TOKEN) for part in parts])  # type: ignore[misc]


EMPTY_PROMPT = Prompt()


@frozen
class InferenceRequest:
    """The client's intention, as long as it lives; a rewritten model is a `dataclasses.replace()`.

    `body` are the client's bytes (empty for a streamed upload), `headers` have lower-case keys, `max_tokens` is the
    limit the client set on the answer (0: none), `received_at` is monotonic seconds.
    """

    id: str
    path: str
    model: str
    prompt: Prompt = EMPTY_PROMPT
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    max_tokens: int = 0
    priority: int = 0
    tenant: str = ""
    received_at: float = 0.0
    state: CycleState = field(default_factory=CycleState)


OUTPUT_ESTIMATE: DataKey[int] = DataKey("OutputEstimate")
"""Tokens the answer is expected to have; the load ledger counts them until the leg ends. Absent: not counted."""
