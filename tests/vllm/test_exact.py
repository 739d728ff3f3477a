"""What is predicted of the KV caches is what the engines find there.

A prediction is right if it is the number of cached tokens that the engine reports, exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.vllm import fleet as fleets
from tests.vllm.client import EngineResponse
from tests.vllm.fleet import ADAPTER, BLOCK, MODEL, Fleet, wait_until, wait_until_equal
from tests.vllm.test_prefix import cached, text

pytest.importorskip("zmq", reason="needs the extra: pip install 'kvlane[precise]'")
pytest.importorskip("tokenizers", reason="needs the extra: pip install 'kvlane[precise]'")

pytestmark = pytest.mark.vllm

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

RIGHT = 0.95
"""Share of the predictions."""

PREDICTED = "kvlane_prefix_predicted_hit_tokens_total"
KNOWN = "kvlane_prefix_index_blocks"
FOR_PROMPTS = "kvlane_prefix_predicted_prompt_tokens_total"

Ask = Callable[..., EngineResponse]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("weather", "population", "mayor")
] + [{"type": "function", "function": {"name": "clock"}}]


class Predictions:
    """Asks through the proxy and notes what it predicted beside what the engine reports."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.pairs: list[tuple[int, int]] = []
        self.requests = 0

    def ask(self, path: str, **fields: Any) -> EngineResponse:
        proxy = self._fleet.proxy
        before, prompts = proxy.sum(PREDICTED), proxy.sum(FOR_PROMPTS)
        response = proxy.http.post(
            path, {"model": MODEL, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
        )
        assert response.status == 200, response.body
        self.requests += 1
        if proxy.sum(FOR_PROMPTS) > prompts:
            self.pairs.append((round(proxy.sum(PREDICTED) - before), cached(response)))
        return response

    def check(self, record_property: Any) -> None:
        """Asking a pod for the token ids may take too long on a busy machine; then nothing is predicted."""
        right = sum(predicted == actual for predicted, actual in self.pairs)
        record_property("right predictions", f"{right} of {len(self.pairs)}")
        record_property("without a prediction", self.requests - len(self.pairs))
        assert len(self.pairs) > self.requests / 2
        record_property("cached tokens", sum(actual for _, actual in self.pairs))
        assert sum(actual for _, actual in self.pairs) > 0
        assert right >= RIGHT * len(self.pairs), self.pairs


@pytest.fixture(params=["local", "pod"])
def exact(request: pytest.FixtureRequest, fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    with following(fleet, tmp_path, request.param) as followed:
        yield followed


@contextmanager
def following(fleet: Fleet, folder: Path, mode: str) -> Iterator[Fleet]:
    """A proxy that tokenises here or asks the pods, and knows what they hold before it serves."""
    tokens = {"local": {"model": str(fleet.model)}} if mode == "local" else {"pod": {}}
    pods = [
        {
            "url": engine.url,
            "labels": {"kvlane/kv-events-port": str(engine.events), "kvlane/kv-replay-port": str(engine.replay)},
        }
        for engine in fleet.engines
    ]
    plugins = [
        {"type": "token-producer", "parameters": tokens},
        {"type": "precise-prefix-cache-producer"},
        {"type": "prefix-cache-scorer"},
        {"type": "active-request-scorer"},
    ]
    config = yaml.safe_dump({"pods": {"static": pods}, "scheduling": {"plugins": plugins}})
    with fleets.proxy(fleet.urls, folder / "exact.log", config) as proxy:
        yield replace(fleet, proxy=proxy)


def test_a_conversation_is_matched_exactly(exact: Fleet, record_property: Any) -> None:
    """Four, a turn each in turn, with parts in the contents of some messages."""
    predictions = Predictions(exact)
    talks: list[list[dict[str, Any]]] = [[{"role": "system", "content": text(150)}] for _ in range(4)]
    for _ in range(5):
        for number, talk in enumerate(talks):
            content: Any = text(30)
            talk.append({"role": "user", "content": [{"type": "text", "text": content}] if number % 2 else content})
            response = predictions.ask(CHAT, messages=talk, max_tokens=24)
            talk.append({"role": "assistant", "content": response.json["choices"][0]["message"]["content"]})
    predictions.check(record_property)


def test_a_chat_with_tools_is_matched_exactly(exact: Fleet, record_property: Any) -> None:
    """Calls and results stand in the history, and tools in the prompt."""
    predictions = Predictions(exact)
    for tools in (TOOLS, TOOLS[:2], TOOLS[2:]):
        talk: list[dict[str, Any]] = [{"role": "system", "content": text(120)}]
        for turn in range(4):
            talk.append({"role": "user", "content": text(20)})
            predictions.ask(CHAT, messages=talk, tools=tools, tool_choice="none")
            called = {"name": "weather", "arguments": '{"place": "Köln", "days": [1, 2]}'}
            talk.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": f"call-{turn}", "type": "function", "function": called}],
                }
            )
            talk.append({"role": "tool", "tool_call_id": f"call-{turn}", "content": '{"rain": true}'})
            predictions.ask(CHAT, messages=talk, tools=tools, tool_choice="none")
    predictions.check(record_property)


def test_adapters_are_matched_exactly(exact: Fleet, record_property: Any) -> None:
    """What an adapter has cached is of no use to its base, nor the other way round."""
    predictions = Predictions(exact)
    for _ in range(3):
        document = text(200)
        for model in (ADAPTER, MODEL, ADAPTER, MODEL):
            messages = [{"role": "system", "content": document}, {"role": "user", "content": text(5)}]
            predictions.ask(CHAT, messages=messages, model=model)
    predictions.check(record_property)


def test_a_salt_is_matched_exactly(exact: Fleet, record_property: Any) -> None:
    """A salt does not profit from what was cached with another salt."""
    predictions = Predictions(exact)
    for _ in range(3):
        document = text(200)
        for salt in ("a", "b", None, "a", "b", None):
            salted = {} if salt is None else {"cache_salt": salt}
            messages = [{"role": "system", "content": document}, {"role": "user", "content": text(5)}]
            predictions.ask(CHAT, messages=messages, **salted)
    predictions.check(record_property)


def test_a_completion_is_matched_exactly(exact: Fleet, record_property: Any) -> None:
    """The same text again and again, longer each time; blocks that end with the prompt are computed again."""
    predictions = Predictions(exact)
    document = "\n".join(text(12) for _ in range(120))
    for end in (1000, 3000, 3000, 6000, len(document), len(document)):
        predictions.ask(COMPLETIONS, prompt=document[:end])
    predictions.check(record_property)


def test_token_ids_are_matched_exactly(fleet: Fleet, tmp_path: Path, record_property: Any) -> None:
    """Prompts of whole blocks: the last one is computed each time."""
    with following(fleet, tmp_path, "local") as exact:
        predictions = Predictions(exact)
        ids = [random.randrange(300, 4000) for _ in range(40 * BLOCK)]
        for blocks in (4, 4, 8, 8, 40, 39, 40):
            predictions.ask(COMPLETIONS, prompt=ids[: blocks * BLOCK])
        predictions.check(record_property)


def test_evicted_blocks_are_not_matched(fleet: Fleet, tmp_path: Path, record_property: Any) -> None:
    """Prompts of more tokens than both caches have room for, each asked twice, the second time in another order."""
    with following(fleet, tmp_path, "local") as exact:
        predictions = Predictions(exact)
        capacity = sum(int(engine.cache()["num_gpu_blocks"]) for engine in exact.engines) * BLOCK
        prompts = [[random.randrange(300, 4000) for _ in range(7000)] for _ in range(capacity // 7000 + 4)]
        for prompt in (*prompts, *random.sample(prompts, len(prompts) // 2)):
            predictions.ask(COMPLETIONS, prompt=prompt, max_tokens=1)
        record_property("room", f"{capacity} of {7000 * len(prompts)} tokens")
        predictions.check(record_property)


def test_a_late_proxy_requests_missed_events(fleet: Fleet, tmp_path: Path, record_property: Any) -> None:
    """It knows what the pods hold although it never sent them anything."""
    documents = [text(300) for _ in range(6)]
    for document in documents:
        fleet.http.post(CHAT, {"model": MODEL, "messages": question(document), "max_tokens": 2})
    with following(fleet, tmp_path, "local") as later:
        wait_until(lambda: later.proxy.sum(KNOWN) >= len(documents) * 300 / BLOCK)  # the reply takes a moment
        predictions = Predictions(later)
        for document in documents:
            predictions.ask(CHAT, messages=question(document))
        predictions.check(record_property)
        assert all(predicted > 0 for predicted, _ in predictions.pairs)


def test_an_engine_whose_cache_was_reset_is_not_matched(fleet: Fleet, tmp_path: Path, record_property: Any) -> None:
    """A cache can be cleared from outside; that is published with the next step."""
    with following(fleet, tmp_path, "local") as exact:
        predictions = Predictions(exact)
        document = text(300)
        home = predictions.ask(CHAT, messages=question(document)).pod
        predictions.ask(CHAT, messages=question(document))
        assert exact.engine(home).http.post("/reset_prefix_cache", b"").status == 200
        wait_until_equal(exact.busy, 0)
        known = exact.proxy.sum(KNOWN)
        exact.engine(home).http.post(COMPLETIONS, {"model": MODEL, "prompt": text(40), "max_tokens": 2})
        wait_until(lambda: exact.proxy.sum(KNOWN) <= known - 300 / BLOCK)  # the event takes a moment
        predictions.ask(CHAT, messages=question(document))
        predictions.check(record_property)


def question(document: str) -> Sequence[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": "What is it about?"}]
