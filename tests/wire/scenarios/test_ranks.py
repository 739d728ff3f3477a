"""Data-parallel ranks behind one port, from the client to the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from proxy.app import App
from proxy.core.endpoint import EndpointState
from proxy.fleet import rank_check
from proxy.fleet.records import RANKS_IGNORED
from proxy.lab.sim import SimConfig
from proxy.tools.presets import scored_by
from tests.helpers.fleet.ranked import BLOCKS, RankedPod
from tests.helpers.http.support import SSE_HEAD, Pod, Received, chunk, plain
from tests.helpers.scenarios.disagg import SIM, disaggregated
from tests.helpers.scenarios.stack import CHAT, running, stack
from tests.helpers.waiting import until

FAST = {"pods": {"refresh": {"interval": "20ms", "maxCore": 1}}}


class Ranks:
    def __init__(self, app: App, http: aiohttp.ClientSession) -> None:
        self.app = app
        self.http = http

    async def ask(self, text: str, headers: Mapping[str, str] | None = None, **fields: Any) -> tuple[str, int]:
        """Return the endpoint that responded, and the tokens that it had cached."""
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
        url = f"http://127.0.0.1:{self.app.port}/v1/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            payload = await response.json()
            assert response.status == 200, payload
            return response.headers["x-kvlane-endpoint"], payload["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def pods(self) -> list[dict[str, Any]]:
        async with self.http.get(f"http://127.0.0.1:{self.app.admin_port}/admin/pods") as response:
            found: list[dict[str, Any]] = (await response.json())["pods"]
            return found


@asynccontextmanager
async def ranks(pod: RankedPod, settings: Mapping[str, Any] | None = None, **keys: Any) -> AsyncIterator[Ranks]:
    given = {**FAST, **(settings or {})}
    async with running([pod.url], given, [keys]) as app, aiohttp.ClientSession() as http:
        await until(lambda: bool(app.fleet.ready))
        yield Ranks(app, http)


async def test_every_conversation_keeps_its_rank_and_is_cached_there() -> None:
    by_prefix = {"scheduling": scored_by({"prefix-cache-scorer": 2, "no-hit-lru-scorer": 1})}
    async with RankedPod(4) as pod, ranks(pod, by_prefix) as r:
        first = {number: await r.ask(f"conversation {number} " * 600) for number in range(8)}
        assert {cached for _, cached in first.values()} == {0}
        assert {name for name, _ in first.values()} == {"pod-0/0", "pod-0/1", "pod-0/2", "pod-0/3"}
        for number, (name, _) in first.items():
            again, cached = await r.ask(f"conversation {number} " * 600)
            assert (again, cached > 0) == (name, True)
        assert pod.requested_ranks[8:] == [int(name[-1]) for name, _ in first.values()]


async def test_the_request_has_one_rank_that_a_client_cannot_set() -> None:
    async with RankedPod(2) as pod, ranks(pod) as r:
        name, _ = await r.ask("x", {"X-Data-Parallel-Rank": "7"}, data_parallel_rank=7, routed_dp_rank=7)
        rank, headers, body = pod.requests[-1]
        assert name == f"pod-0/{rank}"
        assert [value for key, value in headers.items() if key.lower() == "x-data-parallel-rank"] == [str(rank)]
        assert "rank" not in body.decode()


OWN_KEY = {"type": "core-metrics-extractor", "parameters": {"engineLabelKey": "runs"}}


@pytest.mark.parametrize(
    "marked",
    [{"engine": "sglang"}, {"labels": {"llm-d.ai/engine-type": "sglang"}}, {"labels": {"runs": "sglang"}}],
)
async def test_sglang_gets_the_rank_in_the_body_too(marked: dict[str, Any]) -> None:
    own_key = {"scheduling": {"plugins": [{"type": "max-score-picker"}, OWN_KEY]}}
    async with RankedPod(2, engine="sglang") as pod, ranks(pod, own_key, **marked) as r:
        name, _ = await r.ask("x", data_parallel_rank=1, temperature=0)
        rank, headers, body = pod.requests[-1]
        assert name == f"pod-0/{rank}"
        assert json.loads(body)["data_parallel_rank"] == rank
        assert int(headers["Content-Length"]) == len(body)


async def test_a_pod_without_ranks_gets_no_rank_even_from_a_client() -> None:
    async with RankedPod(1) as pod, ranks(pod) as r:
        assert (await r.ask("x", {"X-Data-Parallel-Rank": "0"}))[0] == "pod-0"
        assert not any(name.lower() == "x-data-parallel-rank" for name in pod.requests[-1][1])


async def test_a_hung_rank_is_tried_on_that_rank() -> None:
    async with RankedPod(2) as pod, ranks(pod) as r:
        for rank in r.app.fleet.endpoints:
            assert [await r.app._works(rank) for _ in range(2)] == [True, True]
        assert pod.requested_ranks == [0, 0, 1, 1]


async def test_one_scrape_serves_all_ranks() -> None:
    async with RankedPod(4) as pod, ranks(pod) as r:
        pod.running = [1, 2, 3, 4]
        await until(lambda: [each.metrics.running for each in r.app.fleet.endpoints] == [1, 2, 3, 4])
        assert {each.metrics.blocks for each in r.app.fleet.endpoints} == {BLOCKS}
        before = pod.scrapes
        await until(lambda: pod.scrapes >= before + 4)
        assert len({each.metrics.scraped_at for each in r.app.fleet.endpoints}) == 1


async def test_the_admin_port_shows_a_pod_as_the_sum_of_its_ranks() -> None:
    async with RankedPod(2) as pod, ranks(pod) as r:
        pod.running = [1, 2]
        await until(lambda: [each.metrics.running for each in r.app.fleet.endpoints] == [1, 2])
        (shown,) = await r.pods()
        assert (shown["name"], shown["metrics"]["running"], shown["metrics"]["blocks"]) == ("pod-0", 3, 2 * BLOCKS)
        assert [(each["name"], each["metrics"]["running"]) for each in shown["ranks"]] == [
            ("pod-0/0", 1),
            ("pod-0/1", 2),
        ]


async def test_ranks_share_one_breaker() -> None:
    settings = {"reliability": {"breaker": {"failures": 2, "open": "60s", "panicPercent": 100}}}
    async with RankedPod(4) as pod, ranks(pod, settings) as r:
        pod.status = 500
        for number in range(2):
            with pytest.raises(AssertionError):
                await r.ask(f"{number}")
        await until(lambda: {each.state for each in r.app.fleet.endpoints} == {EndpointState.EJECTED})
        (shown,) = await r.pods()
        assert shown["breaker"] == "open"


async def test_a_pod_that_returns_with_more_ranks_keeps_its_first_ones() -> None:
    async with RankedPod(2) as pod, ranks(pod) as r:
        before = r.app.fleet.endpoints
        pod.resize(3)
        await until(lambda: len(r.app.fleet.ready) == 3)
        assert r.app.fleet.endpoints[:2] == before
        await until(lambda: r.app.fleet.endpoints[2].metrics.blocks == BLOCKS)


async def test_a_declared_size_makes_ranks_before_the_first_scrape() -> None:
    async with RankedPod(2) as pod, ranks(pod, dataParallel={"size": 2}) as r:
        assert [each.name for each in r.app.fleet.endpoints] == ["pod-0/0", "pod-0/1"]


UNSCRAPED = {"pods": {"refresh": {"interval": "20ms", "maxCore": 1, "path": "/nothing"}}}
"""No scrape succeeds, so only refusals say how many ranks a pod has."""


@pytest.mark.parametrize(("size", "left"), [(2, ["pod-0/0", "pod-0/1"]), (1, ["pod-0"])])
async def test_a_declared_size_that_is_too_large_is_corrected_and_no_client_sees_it(size: int, left: list[str]) -> None:
    settings = {
        **UNSCRAPED,
        "scheduling": scored_by({"active-request-scorer": 1}),
        "reliability": {"breaker": {"failures": 1}, "retries": {"attempts": 1}},
    }
    async with RankedPod(size) as pod, ranks(pod, settings, dataParallel={"size": 8}) as r:
        assert len(r.app.fleet.ready) == 8
        names = [(await r.ask(f"{number}"))[0] for number in range(16)]
        refused = [number for number, rank in enumerate(pod.requested_ranks) if rank >= size]
        assert len(refused) == 1
        assert set(names[refused[0] :]) <= set(left)
        assert [each.name for each in r.app.fleet.ready] == left


async def test_requests_that_are_refused_at_the_same_time_all_find_a_rank() -> None:
    settings = {**UNSCRAPED, "scheduling": scored_by({"active-request-scorer": 1})}
    async with RankedPod(2) as pod, ranks(pod, settings, dataParallel={"size": 8}) as r:
        names = await asyncio.gather(*(r.ask(f"{number}") for number in range(32)))
        assert {name for name, _ in names} <= {"pod-0/0", "pod-0/1"}
        assert len(pod.requests) > 32
        assert not r.app.ledger.in_flight


async def test_other_faults_that_a_rank_finds_reach_the_client() -> None:
    async with RankedPod(2) as pod, ranks(pod) as r:
        pod.status = 400
        with pytest.raises(AssertionError, match="broken"):
            await r.ask("x")
        assert len(pod.requests) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_simulated_ranks_that_do_not_exist_are_corrected(streams: bool) -> None:
    settings = {**UNSCRAPED, "scheduling": scored_by({"active-request-scorer": 1})}
    config = SimConfig(time_scale=20, data_parallel_size=3)
    async with stack(1, config, settings, [{"dataParallel": {"size": 8}}]) as s:
        await until(lambda: len(s.app.fleet.ready) == 8)
        for number in range(12):
            body = {"model": "sim", "messages": [{"role": "user", "content": f"{number}"}], "stream": streams}
            async with s.http.post(s.url + CHAT, json={**body, "max_tokens": 2}) as response:
                assert response.status == 200, await response.text()
                assert b"error" not in await response.read()
        assert [each.name for each in s.app.fleet.endpoints] == ["pod-0/0", "pod-0/1", "pod-0/2"]
        await s.idle()


async def test_a_stream_goes_on_although_its_next_rank_does_not_exist() -> None:
    settings = {
        **UNSCRAPED,
        "reliability": {"continuation": {"models": ["*"]}, "breaker": {"failures": 1000}},
        "scheduling": scored_by({"active-request-scorer": 1}),
    }
    text = "data_parallel_rank %d is out of range [0, 1)."
    begun, refused = list[int](), list[int]()

    async def script(request: Received) -> None:
        await request.body()
        rank = int((request.all(b"x-data-parallel-rank") or [b"0"])[0])
        if request.line.startswith(b"GET /health"):
            await request.send(plain())
        elif request.line.startswith(b"GET"):
            await request.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif not begun:
            begun.append(rank)
            await request.send(SSE_HEAD, chunk(b'data: {"choices":[{"index":0,"delta":{"content":"One"}}]}\n\n'))
            request.break_off()
        elif rank:
            refused.append(rank)
            body = json.dumps({"error": {"message": text % rank, "code": 400}}).encode()
            await request.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(body), body)
        else:
            event = b'data: {"choices":[{"index":0,"delta":{"content":" two"},"finish_reason":"stop"}]}\n\n'
            await request.send(SSE_HEAD, chunk(event), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

    async with Pod(script) as pod, aiohttp.ClientSession() as http:
        while not refused:  # one retry in 63 finds the rank that exists
            begun.clear()
            async with running([pod.endpoint.url], settings, [{"dataParallel": {"size": 64}}]) as app:
                await until(lambda: len(app.fleet.ready) == 64)
                body = {"model": "m", "messages": [{"role": "user", "content": "Count"}], "stream": True}
                async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json=body) as response:
                    received = await response.text()
                assert "One" in received
                assert " two" in received
                assert received.endswith("data: [DONE]\n\n")
                assert "error" not in received


async def test_a_prefill_rank_that_does_not_exist_is_followed_by_another() -> None:
    sim = replace(SIM, data_parallel_size=2)
    async with disaggregated("sglang", sim=sim, each=[{"dataParallel": {"size": 4}}] * 4, pods=UNSCRAPED["pods"]) as s:
        await until(lambda: len(s.app.fleet.ready) == 16)
        for number in range(24):
            response, _ = await s.chat(f"prompt {number} " * 40, max_tokens=4)
            assert response.status == 200
        assert len(s.app.fleet.endpoints) == 8
        await s.idle()


async def test_a_configuration_can_keep_a_pod_one_endpoint() -> None:
    async with RankedPod(2) as pod, ranks(pod, dataParallel={"size": 1}) as r:
        assert [each.name for each in r.app.fleet.endpoints] == ["pod-0"]
        assert (await r.ask("x"))[0] == "pod-0"


async def test_a_pod_that_ignores_the_rank_is_detected_and_becomes_one_endpoint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_check, "SLACK", 0.0)
    by_prefix = {"scheduling": scored_by({"prefix-cache-scorer": 1})}
    async with RankedPod(4, obeys=False) as pod, ranks(pod, by_prefix) as r:
        number = 0
        while len(r.app.fleet.endpoints) > 1:
            await r.ask(f"conversation {number % 2} " * 100)
            number += 1
            scraped = pod.scrapes
            await until(lambda: pod.scrapes > scraped + 1)  # noqa: B023
        assert "pod pod-0 ignores the data-parallel rank" in caplog.text
        name, _ = await r.ask("x")
        assert name == "pod-0"
        assert "x-data-parallel-rank" not in {key.lower() for key in pod.requests[-1][1]}
        (shown,) = await r.pods()
        assert shown["doubts"] == [RANKS_IGNORED]


async def test_a_client_can_choose_the_rank_where_security_permits_it() -> None:
    async with RankedPod(3) as pod, ranks(pod, {"security": {"clientRanks": True}}) as r:
        for rank in (2, 0, 2):
            assert (await r.ask("x", {"X-Data-Parallel-Rank": str(rank)}))[0] == f"pod-0/{rank}"
        assert pod.requested_ranks == [2, 0, 2]
        await r.ask("x")
        with pytest.raises(AssertionError, match="no pod has a data-parallel rank '7'"):
            await r.ask("x", {"X-Data-Parallel-Rank": "7"})


@asynccontextmanager
async def with_a_failing_pod(
    good_ranks: int, settings: dict[str, Any]
) -> AsyncIterator[tuple[Ranks, RankedPod, RankedPod]]:
    """A pod of four ranks that fails every request, and a good one."""
    async with RankedPod(4) as bad, RankedPod(good_ranks) as good:
        bad.status = 500
        async with running([bad.url, good.url], settings) as app, aiohttp.ClientSession() as http:
            await until(lambda: len(app.fleet.ready) == 4 + good_ranks)
            yield Ranks(app, http), bad, good


async def test_a_retry_keeps_the_rank_that_the_client_chose() -> None:
    settings = {**FAST, "security": {"clientRanks": True}, "reliability": {"breaker": {"failures": 1000}}}
    async with with_a_failing_pod(2, settings) as (r, bad, good):
        for number in range(10):
            assert (await r.ask(f"{number}", {"X-Data-Parallel-Rank": "1"}))[0] == "pod-1/1"
        with pytest.raises(AssertionError):
            await r.ask("x", {"X-Data-Parallel-Rank": "3"})
        assert set(good.requested_ranks) == {1}
        assert bad.requested_ranks[-1] == 3


async def test_a_retry_goes_to_another_pod_not_to_another_rank() -> None:
    settings = {
        **FAST,
        "reliability": {"breaker": {"failures": 1000}},
        "scheduling": scored_by({"active-request-scorer": 1}),
    }
    async with with_a_failing_pod(1, settings) as (r, bad, _):
        for number in range(20):
            assert (await r.ask(f"{number}"))[0] == "pod-1"
        assert 0 < len(bad.requests) <= 20


async def test_other_ranks_are_tried_without_another_pod() -> None:
    settings = {"reliability": {"breaker": {"failures": 1000}, "retries": {"attempts": 2, "budgetPercent": 100}}}
    async with RankedPod(2) as pod, ranks(pod, settings) as r:
        pod.status = 503
        with pytest.raises(AssertionError):
            await r.ask("x")
        assert set(pod.requested_ranks) == {0, 1}


async def test_simulated_ranks_serve_conversations_from_their_caches() -> None:
    by_prefix = {"scheduling": scored_by({"prefix-cache-scorer": 2, "no-hit-lru-scorer": 1})}
    config = SimConfig(time_scale=20, data_parallel_size=4)
    async with stack(1, config, {**FAST, **by_prefix}) as s:
        await until(lambda: len(s.app.fleet.ready) == 4)
        first = [await s.chat(f"conversation {number} " * 200) for number in range(8)]
        again = [await s.chat(f"conversation {number} " * 200) for number in range(8)]
        names = [response.headers["x-kvlane-endpoint"] for response, _ in first]
        assert set(names) == {f"pod-0/{rank}" for rank in range(4)}
        assert names == [response.headers["x-kvlane-endpoint"] for response, _ in again]
        assert all(result["usage"]["prompt_tokens_details"]["cached_tokens"] > 100 for _, result in again)
        assert [endpoint.name for endpoint in s.app.fleet.endpoints] == [f"pod-0/{rank}" for rank in range(4)]
        await s.idle()


async def test_prefill_and_decode_ranks_are_chosen_separately() -> None:
    sim = replace(SIM, data_parallel_size=2)
    async with disaggregated("sglang", sim=sim, each=[{"dataParallel": {"size": 2}}] * 4) as s:
        seen = set()
        for number in range(8):
            response, _ = await s.chat(f"prompt {number} " * 40, max_tokens=4)
            assert response.status == 200
            seen.add(response.headers["x-kvlane-endpoint"])
        assert len(seen) > 1
        assert seen <= {f"pod-{pod}/{rank}" for pod in (2, 3) for rank in range(2)}
        await s.idle()
