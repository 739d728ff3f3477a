"""Data-parallel ranks of one engine: a request goes to the rank that it names, and finds its prefix there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import fleet as fleets
from tests.vllm.client import EngineResponse
from tests.vllm.fleet import BLOCK, Engine, Fleet, Start, Vllm, wait_until
from tests.vllm.test_prefix import cached, chat, prompt_tokens, question, text

pytestmark = pytest.mark.vllm

RANKS = 2


@pytest.fixture(scope="module")
def engine(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--data-parallel-size", str(RANKS), "--kv-events-config", '{"enable_kv_cache_events": false}')
    with ExitStack() as stack:
        environ = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
        (started,) = fleets.started(stack, vllm, tmp_path_factory.mktemp("ranks"), [Start(0, flags, environ)])
        yield started


@pytest.fixture
def ranked(engine: Engine, vllm: Vllm, tmp_path: Path) -> Iterator[Fleet]:
    with fleets.proxy([engine.url], tmp_path / "proxy.log") as proxy:
        wait_until(lambda: names(proxy) == {f"{engine.name}/{rank}" for rank in range(RANKS)})
        yield Fleet([engine], proxy, vllm.model)


def names(proxy: fleets.Proxy) -> set[str]:
    pods = proxy.admin.get("/admin/pods").json["pods"]
    return {rank["name"] for pod in pods for rank in pod.get("ranks", ())}


def counted(engine: Engine) -> list[float]:
    """Prompt tokens of each rank."""
    exposition = engine.http.get("/metrics").body.decode()
    found = dict(re.findall(r'^vllm:prompt_tokens_total\{[^}]*engine="(\d+)"[^}]*\} (\S+)$', exposition, re.M))
    return [float(found[str(rank)]) for rank in range(RANKS)]


def test_the_header_selects_the_rank(engine: Engine, record_property: Any) -> None:
    """Twice the same prompt to the same rank is cached, and the counter of that rank alone grows."""
    for rank in range(RANKS):
        before, prompt = counted(engine), text(200)
        responses = [ask(engine, prompt, rank) for _ in range(2)]
        wait_until(lambda: sum(counted(engine)) > sum(before))  # noqa: B023
        grown = [after - earlier for after, earlier in zip(counted(engine), before, strict=True)]
        assert [bool(each) for each in grown] == [each == rank for each in range(RANKS)]
        assert cached(responses[1]) >= prompt_tokens(responses[1]) - 2 * BLOCK
        record_property(f"tokens counted by the ranks for rank {rank}", ", ".join(f"{each:g}" for each in grown))


def test_a_document_stays_on_its_rank(ranked: Fleet, record_property: Any) -> None:
    documents = [text(400) for _ in range(6)]
    first = [chat(ranked, question(document, "What is it about?")) for document in documents]
    second = [chat(ranked, question(document, "Who wrote it?")) for document in documents]
    assert [response.pod for response in second] == [response.pod for response in first]
    assert len({response.pod for response in first}) == RANKS
    for response in second:
        assert cached(response) >= prompt_tokens(response) - 3 * BLOCK
    record_property(
        "cached of the second questions", f"{sum(map(cached, second))} of {sum(map(prompt_tokens, second))}"
    )


def ask(engine: Engine, prompt: str, rank: int) -> EngineResponse:
    body = {"model": fleets.MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": 2}
    return engine.http.post("/v1/chat/completions", body, {"X-data-parallel-rank": str(rank)})
