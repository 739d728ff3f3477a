from __future__ import annotations

import math

import aiohttp
import pytest

from proxy.lab.sim import SimPod
from tests.helpers.lab.sim.support import USER, post


async def test_an_embedding_is_a_function_of_its_text(pod: SimPod, client: aiohttp.ClientSession) -> None:
    first = await post(client, "/v1/embeddings", input=["a", "b"], dimensions=8)
    second = await post(client, "/v1/embeddings", input="a", dimensions=8)
    assert first["data"][0]["embedding"] == second["data"][0]["embedding"] != first["data"][1]["embedding"]
    assert math.hypot(*second["data"][0]["embedding"]) == pytest.approx(1)
    assert first["usage"]["prompt_tokens"] == pod.requests[0].prompt_tokens == 2
    assert pod.engine.stats.generation_tokens == 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_are_ranked_best_first(client: aiohttp.ClientSession, path: str) -> None:
    reply = await post(client, path, query="q", documents=["a", "b", "c"], top_n=2)
    scores = [result["relevance_score"] for result in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2


async def test_one_text_is_scored_against_many(client: aiohttp.ClientSession) -> None:
    reply = await post(client, "/score", text_1="q", text_2=["a", "b"])
    assert [item["index"] for item in reply["data"]] == [0, 1]


async def test_a_text_has_a_class(client: aiohttp.ClientSession) -> None:
    (found,) = (await post(client, "/classify", input="a"))["data"]
    assert sum(found["probs"]) == pytest.approx(1)
    assert found["label"] in {"LABEL_0", "LABEL_1"}


async def test_messages_are_pooled_too(client: aiohttp.ClientSession) -> None:
    (found,) = (await post(client, "/pooling", messages=USER))["data"]
    assert found["object"] == "pooling"
