"""Answers that depend on the text before them and on nothing else.

The next word is a function of all text so far, prompt and answer alike. So an answer that was interrupted and is
continued from `prompt + partial answer`, on this pod or another, ends with exactly the words that were missing.
"""

from __future__ import annotations

from xxhash import xxh3_64

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
"""64 words of one token each. With the space they have four bytes, so that text and tokens agree in both directions."""

_EOS_STEPS = 1 << 32


class Writer:
    """Writes one answer, word by word."""

    def __init__(self, prompt: bytes | bytearray, seed: int, eos_probability: float) -> None:
        self._hash = xxh3_64(prompt, seed=seed)
        self._eos_below = int(eos_probability * _EOS_STEPS)

    def next_word(self, *, may_end: bool) -> bytes | None:
        """The next word, or None where the answer ends by itself."""
        digest = self._hash.intdigest()
        if may_end and (digest >> 32) < self._eos_below:
            return None
        word = WORDS[digest & 63]
        self._hash.update(word)
        return word


def tokens_in(text: bytes | bytearray) -> int:
    return -(-len(text) // BYTES_PER_TOKEN)
