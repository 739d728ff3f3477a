"""Chunks that are held, and chunks that are too large to be."""

from __future__ import annotations

import pytest

from proxy.http.framing import HELD_LIMIT, LAST_CHUNK, Rechunked, WholeChunks
from tests.helpers.http.support import chunk, event, understand

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
OPENED, CLOSED = 0, 1
LARGE = b"data: " + b"x" * 80_000 + b"\n\n"


def reads(raw: bytes, *cuts: int) -> list[tuple[bytes, list[bytes], list[int]]]:
    """Return what the parser finds in each read of a chunked body without extensions."""
    state, size, line = "size", 0, b""
    found: list[tuple[bytes, list[bytes], list[int]]] = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        body, marks, at = b"", [], start
        while at < end:
            if state == "body" and size:
                piece = raw[at : min(at + size, end)]
                body, size, at = body + piece, size - len(piece), at + len(piece)
                continue
            byte, at = raw[at : at + 1], at + 1
            if state == "size":
                line += byte
                if line.endswith(b"\r\n"):
                    size, line, state = int(line, 16), b"", "body"
                    marks.append(OPENED)
            elif byte == b"\n":
                marks.append(CLOSED)
                state = "size"
            else:
                state = "body"
        found.append((raw[start:end], [body] if body else [], marks))
    return found


def relayed(found: list[tuple[bytes, list[bytes], list[int]]]) -> bytes:
    framing = WholeChunks()
    out = b"".join(framing.feed(*read) for read in found[:-1])
    raw, bodies, _ = found[-1]
    return out + framing.finish(raw, bodies, True)


@pytest.mark.parametrize("cut", range(1, 40))
def test_after_a_split_chunk_read_boundaries_are_found_again(cut: int) -> None:
    raw = chunk(LARGE) + event("a") + event("b") + b"0\r\n\r\n"
    at = len(chunk(LARGE)) - 4 + cut
    seen = understand(HEAD + relayed(reads(raw, HELD_LIMIT + 2000, at)))
    assert (seen.body, seen.ending) == (LARGE + b"data: a\n\ndata: b\n\n", "complete")


def test_a_chunk_is_held_up_to_the_limit_and_then_passed_in_parts() -> None:
    framing = WholeChunks()
    raw = chunk(LARGE)
    first, second, third, _ = reads(raw, HELD_LIMIT - 100, HELD_LIMIT + 100, HELD_LIMIT + 200)
    assert framing.feed(*first) == b""
    passed = framing.feed(*second)
    assert passed == chunk(LARGE[: HELD_LIMIT + 100 - len(b"13888\r\n")])
    assert framing.feed(*third) == chunk(third[0])


def test_a_split_event_is_closed_before_the_error() -> None:
    framing = WholeChunks()
    first = reads(chunk(LARGE), HELD_LIMIT + 100)[0]
    framing.feed(*first)
    assert framing.end_with(b"data: error\n\n", first[1][0]) == chunk(b"\n\ndata: error\n\n") + b"0\r\n\r\n"


def test_if_only_the_held_part_is_known_the_error_follows_a_blank_line() -> None:
    framing = WholeChunks()
    framing.feed(*reads(event("sent"))[0])
    held = reads(chunk(LARGE), 30_000)[0]
    framing.feed(*held)
    assert framing.end_with(b"data: e\n\n", held[1][0][-8192:]) == chunk(b"\n\ndata: e\n\n") + b"0\r\n\r\n"


def test_after_the_held_bytes_of_a_stream_that_ends_in_an_event_the_error_follows_a_blank_line() -> None:
    framing = WholeChunks()
    raw = event("a") + chunk(b"data: ha") + LAST_CHUNK
    found = reads(raw, len(event("a")), len(raw) - len(b"\r\n" + LAST_CHUNK))
    sent = b"".join(framing.feed(*read) for read in found[:2])
    assert sent == event("a")
    sent += framing.finish(found[2][0], [], True).removesuffix(LAST_CHUNK)
    cut = framing.end_with(b"data: error\n\n", b"data: a\n\ndata: ha")
    assert cut is not None
    assert understand(HEAD + sent + cut).body == b"data: a\n\ndata: ha\n\ndata: error\n\n"


def test_reads_become_chunks_without_chunks() -> None:
    framing = Rechunked()
    assert framing.feed(b"ab", [b"ab"], []) == b"2\r\nab\r\n"
    assert framing.feed(b"", [], []) == b""
    assert framing.finish(b"", [], True) == b"0\r\n\r\n"


@pytest.mark.parametrize("end", range(1, len(event("a") + event("b"))))
def test_with_any_reads_a_cut_leaves_whole_events_and_the_error(end: int) -> None:
    framing = WholeChunks()
    read = reads((event("a") + event("b"))[:end])[0]
    sent = framing.feed(*read)
    cut = framing.end_with(b"data: error\n\n", b"".join(read[1]))
    assert cut is not None
    seen = understand(HEAD + sent + cut)
    assert seen.ending == "complete"
    assert seen.body in (b"data: error\n\n", b"\n\ndata: error\n\n", b"data: a\n\ndata: error\n\n")


@pytest.mark.parametrize("cut", range(1, len(event("a") + chunk(b"data: b"))))
def test_an_incomplete_stream_is_closed_before_the_error_wherever_its_reads_end(cut: int) -> None:
    framing = WholeChunks()
    first, (raw, bodies, _) = reads(event("a") + chunk(b"data: b") + b"0\r\n\r\n", cut)
    sent = framing.feed(*first) + framing.finish(raw, bodies, True).removesuffix(b"0\r\n\r\n")
    end = framing.end_with(b"data: error\n\n", b"data: a\n\ndata: b")
    assert end is not None
    seen = understand(HEAD + sent + end)
    assert (seen.body, seen.ending) == (b"data: a\n\ndata: b\n\ndata: error\n\n", "complete")
