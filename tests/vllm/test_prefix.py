"""Requests go where their prefix is in the KV cache.

`cached` are the prompt tokens that the engine itself reports as found in its cache.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from tests.vllm.client import Client, EngineResponse
from tests.vllm.fleet import BLOCK, MODEL, Fleet, wait_until

pytestmark = pytest.mark.vllm

WORDS = ("engine", "router", "block", "token", "cache", "prefix", "queue", "stream", "answer", "kernel", "layer", "pod")


def text(words: int) -> str:
    """New in every run, so that no engine has seen it."""
    return " ".join(f"{random.choice(WORDS)}{random.randrange(100)}" for _ in range(words))


def test_a_second_request_with_the_same_prefix_goes_to_the_same_pod(fresh: Fleet, record_property: Any) -> None:
    """Eight documents, two questions each, in random order: they are on both pods, so staying is no accident."""
    documents = [text(400) for _ in range(8)]
    first = [chat(fresh, question(document, "What is it about?")) for document in documents]
    again = random.sample(range(len(documents)), len(documents))
    second = {index: chat(fresh, question(documents[index], "Who wrote it?")) for index in again}
    for index, response in second.items():
        assert response.pod == first[index].pod
        assert cached(response) >= prompt_tokens(response) - 3 * BLOCK
    assert len({response.pod for response in first}) == 2
    tokens = sum(map(prompt_tokens, second.values()))
    record_property("documents", len(documents))
    record_property("cached at the first question", sum(map(cached, first)))
    record_property("at the second", f"{sum(map(cached, second.values()))} of {tokens} tokens")


def test_a_conversation_stays_on_its_pod(fresh: Fleet, record_property: Any) -> None:
    """Four conversations, one turn each in rotation: all earlier text is found in the cache."""
    talks = [[{"role": "system", "content": text(150)}] for _ in range(4)]
    homes: list[str | None] = [None] * len(talks)
    known = [0] * len(talks)
    figures = []
    for turn in range(5):
        for number, talk in enumerate(talks):
            talk.append({"role": "user", "content": text(30)})
            response = chat(fresh, talk, max_tokens=24)
            assert response.pod == (homes[number] or response.pod), f"turn {turn} of conversation {number} moved"
            assert cached(response) >= known[number] - BLOCK
            homes[number], known[number] = response.pod, prompt_tokens(response)
            talk.append(response.json["choices"][0]["message"] | {"role": "assistant"})
            if number == 0:
                figures.append(f"{cached(response)} of {prompt_tokens(response)}")
    assert len(set(homes)) == 2
    record_property("cached per turn of the first", ", ".join(figures))


def test_cached_prompts_start_sooner(fleet: Fleet, record_property: Any) -> None:
    """Time to the first token of a stream, new and repeated, through the proxy and directly; medians of three."""
    for size in (512, 2048, 6000):
        cold, warm = first_bytes(fleet.http, size)
        cold_directly, warm_directly = first_bytes(fleet.engines[0].http, size)
        record_property(
            f"{size} tokens:",
            f"{cold:.0f} ms cold, {warm:.0f} ms warm (directly {cold_directly:.0f} and {warm_directly:.0f})",
        )
    assert warm < cold / 2


def test_the_overhead_of_the_proxy_is_small(fleet: Fleet, record_property: Any) -> None:
    """One token of a short prompt, on one connection; a tenth of a second would be a fault, not a slow host."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    through = statistics.median(fleet.http.seconds_each("/v1/completions", body, 60))
    directly = statistics.median(fleet.engines[0].http.seconds_each("/v1/completions", body, 60))
    assert through - directly < 0.1
    record_property("median", f"{through * 1000:.1f} ms, directly {directly * 1000:.1f} ms")


def test_the_pods_are_recognised_with_their_properties(fleet: Fleet, record_property: Any) -> None:
    pods = fleet.proxy.pods()
    assert set(pods) == {engine.name for engine in fleet.engines}
    for engine in fleet.engines:
        pod, cache = pods[engine.name], engine.cache()
        assert pod["state"] == "ready"
        assert pod["metrics"]["freshness"] == "fresh"
        assert pod["metrics"]["blockSize"] == int(cache["block_size"]) == BLOCK
        assert pod["metrics"]["blocks"] == int(cache["num_gpu_blocks"])
        assert MODEL in pod["models"]
    adapted = pods[fleet.adapted.name]["metrics"]
    assert adapted["maxActiveModels"] == 1
    record_property("blocks", f"{adapted['blocks']} of {adapted['blockSize']} tokens")


def test_running_requests_on_a_pod_are_seen(fleet: Fleet) -> None:
    body = {"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": 8000, "ignore_eos": True}
    with fleet.http.pending("/v1/completions", body) as stream:
        assert stream.read(6) == b"data: "
        wait_until(lambda: sum(pod["metrics"]["running"] for pod in fleet.proxy.pods().values()) == 1)
        assert fleet.proxy.in_flight() == 1
        assert fleet.proxy.sum("kvlane_endpoint_in_flight_requests") == 1
    wait_until(lambda: sum(pod["metrics"]["running"] for pod in fleet.proxy.pods().values()) == 0)
    assert fleet.proxy.in_flight() == 0


def test_tokens_are_counted_as_the_engines_report_them(fleet: Fleet, record_property: Any) -> None:
    names = ("kvlane_prompt_tokens_total", "kvlane_completion_tokens_total", "kvlane_cached_tokens_total")
    document = text(200)
    chat(fleet, question(document, "What is it about?"))
    before = [fleet.proxy.sum(name) for name in names]
    response = chat(fleet, question(document, "Who wrote it?"), max_tokens=5)
    after = [fleet.proxy.sum(name) for name in names]
    counted = [int(b - a) for a, b in zip(before, after, strict=True)]
    assert counted == [prompt_tokens(response), 5, cached(response)]
    assert cached(response) > 0
    record_property("prompt, response and cached tokens", ", ".join(map(str, counted)))


def question(document: str, about_it: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": document}, {"role": "user", "content": about_it}]


def chat(fleet: Fleet, messages: Any, max_tokens: int = 4) -> EngineResponse:
    body = {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = fleet.http.post("/v1/chat/completions", body)
    assert response.status == 200, response.body
    return response


def first_bytes(server: Client, size: int) -> tuple[float, float]:
    """Milliseconds to the first token of new prompts, and of the same once more; medians of three."""
    cold, warm = [], []
    for _ in range(3):
        prompt = [random.randrange(300, 4000) for _ in range(size)]
        body = {"model": MODEL, "prompt": prompt, "stream": True, "max_tokens": 2, "ignore_eos": True}
        cold.append(server.post("/v1/completions", body).first_byte)
        warm.append(server.post("/v1/completions", body).first_byte)
    return statistics.median(cold) * 1000, statistics.median(warm) * 1000


def cached(response: EngineResponse) -> int:
    return int(response.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_tokens(response: EngineResponse) -> int:
    return int(response.json["usage"]["prompt_tokens"])
