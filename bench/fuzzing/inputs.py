"""Inputs: the files of `tests/corpus`, and mutations of them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from zlib import crc32

CORPUS = Path(__file__).resolve().parents[2] / "tests" / "corpus"

LONGEST = 64 * 1024
"""Bytes of an input."""

Check = Callable[[bytes, random.Random], Awaitable[str]]
"""Send one input and return what is wrong with the reaction; empty: nothing. The choices of a check come from the
generator, which is seeded with the input, so that a stored input repeats them."""

LATE = "time-out: "
"""The beginning of a failure that may be that of a busy machine. It counts if it repeats."""

WORDS: tuple[bytes, ...] = (
    *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"\xff", b"\xc3\x28", b"%00", b"%2e"),
    *(b"transfer-encoding: chunked\r\n", b"content-length: 2\r\n", b"content-length: 99999999999999999999\r\n"),
    *(b"connection: close\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n", b"expect: 100-continue\r\n"),
    *(b"0\r\n\r\n", b"2\r\n{}\r\n", b"fffffffff\r\n", b"HTTP/1.1 ", b"HTTP/1.0 ", b"GET ", b"HEAD "),
    *(b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 101 x\r\n\r\n", b"data: [DONE]\n\n", b'data: {"usage":{}}\n\n'),
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b'"\\ud800"', b"[" * 200, b"{" * 200, b'{"a":' * 200, b"9" * 400),
    *(b"9" * 5000, b"-9223372036854775809", b"18446744073709551616", b"0.5", b"[]", b"{}", b'""', b"2030-02-30"),
    *(b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"${HOME}", b"${X:-", b"? ", b"- ", b"---\n", b"|\n"),
)


class Mutator:
    """Half of what it inserts are words of the target, one a line with Python's escapes, where it has any."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self._rng = rng
        words = _words(CORPUS / "words" / name)
        self._words = (*WORDS, *words * (1 + len(WORDS) // (1 + len(words))))
        self.corpus = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]

    def next(self) -> bytes:
        data = self._rng.choice(self.corpus)
        for _ in range(self._rng.randrange(6)):
            data = self._mutated(data)
        return data[:LONGEST]

    def _mutated(self, data: bytes) -> bytes:
        rng = self._rng
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 2, 4, 16, 200)))
        kind = rng.randrange(8)
        if kind == 0:
            return data[:start] + data[end:]
        if kind == 1:
            return data[:start] + rng.choice(self._words) + data[start:]
        if kind == 2:
            return data[:start] + rng.choice(self._words) + data[end:]
        if kind == 3:
            return data[:end] + data[start:end] * rng.choice((1, 2, 50)) + data[end:]
        if kind == 4:
            return data[:start] + bytes([rng.randrange(256)]) + data[start + 1 :]
        if kind == 5:
            return self._with_another_value(data)
        if kind == 6:
            return self._with_a_line_elsewhere(data)
        other = rng.choice(self.corpus)
        return data[:start] + other[rng.randrange(len(other) + 1) :]

    def _with_another_value(self, data: bytes) -> bytes:
        """Replace what stands between a colon and the next separator: a value of JSON, YAML or a header."""
        start = data.find(b":", self._rng.randrange(len(data) + 1)) + 1
        end = min((at for each in b",}\r\n" if (at := data.find(bytes([each]), start)) >= 0), default=len(data))
        return data[:start] + self._rng.choice(self._words) + data[end:]

    def _with_a_line_elsewhere(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True) or [b""]
        line = self._rng.choice(lines)
        if self._rng.randrange(2):
            lines.remove(line)
        lines.insert(self._rng.randrange(len(lines) + 1), line)
        return b"".join(lines)


def _words(file: Path) -> list[bytes]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.encode().decode("unicode_escape").encode("latin-1") for line in lines]


def seeded(data: bytes) -> random.Random:
    """Return the generator for the choices of one input."""
    return random.Random(crc32(data))


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True) if start < end]
