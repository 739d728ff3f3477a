"""The way of events through stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.http import pipeline
from proxy.http.pipeline import Pipeline
from proxy.openai.events import DropUsage

EVENTS = (b"data: 1\n\n", b"data: 2\r\n\r\n", b": note\r\r", b"\n\n", b"data: 3\ndata: 4\n\n")


class Seen:
    """A transform that changes nothing and notes what it is given."""

    def __init__(self) -> None:
        self.events: list[bytes] = []

    def process(self, events: list[bytes], ends: bool) -> list[bytes]:
        self.events += events
        return events


@given(st.lists(st.sampled_from(EVENTS), max_size=6), st.data())
def test_stages_see_whole_events_with_any_reads(events: list[bytes], data: st.DataObject) -> None:
    body = b"".join(events)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=6)))
    seen = Seen()
    line = Pipeline([seen.process], chunked=False)
    out = b"".join(line.process(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True))
    assert out + line.finish(b"", [], True) == body
    assert seen.events == events


def test_an_unfinished_event_passes_the_stages_at_the_end_of_the_stream() -> None:
    seen = Seen()
    line = Pipeline([seen.process], chunked=False)
    assert line.process(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert line.finish(b"", [b"3"], True) == b"data: 23"
    assert seen.events == [b"data: 1\n\n", b"data: 23"]


def test_an_event_beyond_the_limit_is_passed_in_parts_and_closed_before_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "LARGEST_EVENT", 1000)
    line = Pipeline([DropUsage().process], chunked=False)
    piece, sent = b"data: " + b"x" * 100, b""
    while len(sent) <= 1000:
        sent += piece
        assert line.process(piece) in (b"", sent)
    assert line.end_with(b"data: error\n\n", b"") == b"\n\ndata: error\n\n"
    assert line.process(b"more\n\n") == b"more\n\n"
    assert line.end_with(b"data: error\n\n", b"") == b"data: error\n\n"
