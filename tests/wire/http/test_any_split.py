"""Responses in any reads: in memory for every corner, over sockets against a plain relay."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Ending
from proxy.core.errors import UpstreamFailed
from tests.helpers.examples import examples
from tests.helpers.http.messages import Message, garbage, messages, reads
from tests.helpers.http.oracle import HOP_BY_HOP, oracle
from tests.helpers.http.support import Pod, Received, Seen, post, rig
from tests.helpers.http.wire import Outcome, play

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MANY = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SOME = settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def is_whole(outcome: Outcome) -> bool:
    """Whether the client could take what it has for a complete response."""
    if outcome.aborted or not outcome.raw:
        return False
    return outcome.seen().ending == "complete"


@MANY
@given(st.data(), messages(), st.booleans())
def test_a_valid_response_is_the_same_with_any_reads(data: st.DataObject, message: Message, speaks_11: bool) -> None:
    outcome = play(data.draw(reads(message.raw)), "closed" if message.closes else "open", speaks_11)
    seen = outcome.seen()
    assert outcome.attempt.ending is Ending.COMPLETE
    assert (seen.body, seen.ending) == (message.body, "complete")
    assert outcome.attempt.response_bytes == len(message.body)
    assert message.chunks in (None, outcome.attempt.chunks)
    lines = message.raw[: message.head].split(b"\r\n\r\n")[-2].split(b"\r\n")
    kept = [line for line in lines[1:] if not line.lower().startswith((b"transfer-encoding", b"keep-alive"))]
    assert outcome.raw.partition(b"\r\n\r\n")[0].split(b"\r\n")[1 : 1 + len(kept)] == kept
    assert outcome.raw.startswith(b"HTTP/1.1 " + lines[0][9:] + b"\r\n")


@MANY
@given(st.data(), messages())
def test_a_truncated_response_never_looks_complete(data: st.DataObject, message: Message) -> None:
    kept = data.draw(st.integers(0, len(message.raw) - 1))
    ending = data.draw(st.sampled_from(("closed", "reset")))
    outcome = play(data.draw(reads(message.raw[:kept])), ending)
    if message.closes and kept >= message.head and ending == "closed":
        return  # ambiguous
    assert outcome.attempt.ending is Ending.UPSTREAM_FAILED
    assert not outcome.open
    if not outcome.raw:
        assert isinstance(outcome.error, UpstreamFailed)
    elif message.events and (message.closes or message.chunks is not None):
        check_error_event(outcome, message.body)
    else:
        assert not is_whole(outcome)


def check_error_event(outcome: Outcome, body: bytes) -> None:
    """A stream that says that it was cut: events of the pod, a blank line, the error, and no terminal event."""
    seen = outcome.seen()
    assert seen.ending == "complete"
    sent, mark, error = seen.body.rpartition(b"data: {")
    assert mark
    assert b'"error"' in error
    assert error.endswith(b"}\n\n")
    assert sent.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")) or not sent
    assert body.startswith((sent, sent.removesuffix(b"\n\n")))


@MANY
@given(st.data(), garbage(), st.one_of(st.just(None), messages()))
def test_malformed_responses_never_end_cleanly(data: st.DataObject, noise: bytes, before: Message | None) -> None:
    """Alone, or in the middle of a chunked response."""
    raw = noise if before is None else before.raw[: data.draw(st.integers(0, len(before.raw) - 1))] + noise
    outcome = play(data.draw(reads(raw)), "reset")
    assert not outcome.open
    if outcome.attempt.ending is Ending.COMPLETE:
        assert before is not None or noise.startswith(b"HTTP/1.")
        assert outcome.seen().ending == "complete"
    elif outcome.raw and is_whole(outcome):
        assert b'"error"' in outcome.seen().body


@MANY
@given(st.data(), messages(), st.binary(min_size=1, max_size=40))
def test_bytes_after_a_response_are_never_passed_on(data: st.DataObject, message: Message, more: bytes) -> None:
    if message.closes:
        return
    more = data.draw(st.sampled_from((more, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", message.raw)))
    outcome = play([message.raw + more], "open")
    assert outcome.seen().body == message.body
    assert b"\r\n\r\n" in outcome.raw
    head, _, rest = outcome.raw.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        assert rest.endswith(b"0\r\n\r\n")
        assert len(rest) <= len(message.raw) - message.head
    assert not outcome.reused or not more.strip(b"\r\n")


@SOME
@given(st.data(), messages())
def test_over_sockets_a_plain_relay_gives_the_same(data: st.DataObject, message: Message) -> None:
    pieces = data.draw(reads(message.raw))
    if len(pieces) > 20:
        pieces = [message.raw]
    whole = data.draw(st.booleans())
    if not whole:
        pieces = [b"".join(pieces)[: data.draw(st.integers(0, len(message.raw) - 1))]]
    ours, plain = asyncio.run(_both(pieces, close=message.closes or not whole))
    if not whole and 502 in (ours.status, plain.status):
        return
    if whole:
        assert (ours.ending, ours.body) == (plain.ending, plain.body) == ("complete", message.body)
    assert (ours.status, _end_to_end(ours)) == (plain.status, _end_to_end(plain))
    if plain.ending == "cut" and ours.ending == "complete":
        assert b'"error"' in ours.body


async def _both(pieces: list[bytes], close: bool) -> tuple[Seen, Seen]:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(*pieces, pause=0.0005 if len(pieces) > 1 else 0)
        if close:
            request.break_off()

    request = post(body=b'{"stream":true}')
    async with Pod(script) as pod, rig(pod) as port, oracle(pod) as plain:
        return await port.ask(request), await plain.ask(request)


def _end_to_end(seen: Seen) -> list[tuple[str, str]]:
    """Names in lower case, because aiohttp respells some, without what its server adds of its own, and without the one
    value that it cannot carry."""
    ignored = (*HOP_BY_HOP, "x-request-id", "date", "x-latin")
    fields = [(name.lower(), value) for name, value in seen.headers]
    added = (("content-type", "application/octet-stream"), ("server", f"Python/{PYTHON} aiohttp/{aiohttp.__version__}"))
    return sorted(field for field in fields if field[0] not in ignored and field not in added)
