"""A stream whose connection breaks goes on with the other engine.

The model is random, and what it writes may be cut into other tokens when it is read again; and an engine under pressure
puts several tokens into one event. So the number of equal responses and usages is a figure.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.client import EngineResponse
from tests.vllm.fleet import MODEL, Fleet, proxy
from tests.vllm.tap import Recording, Tap, pass_on

pytestmark = pytest.mark.vllm

TOKENS = 24
END = b"\n\n\r\n"
"""Of an event that is a chunk."""

CUTS = (1, 2, 5, 11, 23, 24, 25)
"""Events that have passed; of a chat the first has the role, behind the last token come usage and end."""

BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
HELLO = [{"role": "user", "content": "Hello there"}]
BODIES = {
    "/v1/chat/completions": {**BODY, "messages": HELLO},
    "/v1/completions": {**BODY, "prompt": "Hello"},
}


class Scissors(Tap):
    """Breaks off the response to the first POST, after so many events."""

    def __init__(self, target: str, events: int) -> None:
        super().__init__(target)
        self._left = events
        self.has_cut = False

    def _relay(self, client: socket.socket) -> None:
        recording = Recording()
        with closing(socket.create_connection(self._target)) as server:
            upwards = threading.Thread(target=pass_on, args=(client, server, recording.up))
            upwards.start()
            self._pass_responses(server, client, recording)
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            upwards.join()

    def _pass_responses(self, server: socket.socket, client: socket.socket, recording: Recording) -> None:
        with suppress(OSError):
            while piece := server.recv(65536):
                if b"POST " not in recording.up or self.has_cut:
                    client.sendall(piece)
                    continue
                *events, begun = piece.split(END)
                client.sendall(b"".join(event + END for event in events[: self._left]))
                self._left -= len(events)
                if self._left <= 0:
                    self.has_cut = True
                    return
                client.sendall(begun)


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_cut_anywhere_continues_as_one(fleet: Fleet, tmp_path: Path, path: str, record_property: Any) -> None:
    body = BODIES[path]
    whole = read(fleet.engines[0].http.post(path, body))
    texts = usages = 0
    for events in CUTS:
        with (
            Scissors(fleet.engines[0].http.host, events) as first,
            Scissors(fleet.engines[1].http.host, 10**9) as other,
        ):
            config = f"""
pods: {{static: [{{url: "{first.url}"}}, {{url: "{other.url}"}}]}}
reliability: {{continuation: {{models: ["{MODEL}"]}}, drain: {{settle: 0s}}}}
"""
            with proxy([], tmp_path / f"proxy-{events}.log", config) as continuing:
                while not first.has_cut:
                    response = continuing.http.post(path, body)
        assert response.status == 200
        seen = read(response)
        assert set(seen["ids"]) == {seen["ids"][0]}
        assert seen["roles"] == whole["roles"]
        assert 0 < seen["usage"]["completion_tokens"] <= TOKENS
        assert seen["finish"] == ["length"]
        assert seen["end"] == 1
        texts += seen["text"] == whole["text"]
        usages += all(seen["usage"][name] == whole["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
    record_property("cuts", len(CUTS))
    record_property("texts that are the same to the byte", texts)
    record_property("usages that are the same", usages)


def read(body: EngineResponse) -> dict[str, Any]:
    lines = [line.removeprefix("data: ") for line in body.body.decode().split("\n\n") if line]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert not any("error" in event for event in events), body.body
    choices = [event["choices"][0] for event in events if event["choices"]]
    deltas = [choice.get("delta", {"content": choice.get("text")}) for choice in choices]
    return {
        "ids": [(event["id"], event["created"], event["model"]) for event in events],
        "text": "".join(part.get("content") or "" for part in deltas),
        "roles": [part["role"] for part in deltas if part.get("role")],
        "usage": next(event["usage"] for event in events if not event["choices"]),
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "end": lines.count("[DONE]"),
    }
