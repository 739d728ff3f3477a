"""Requests that crash engines, and the innocent ones beside them, before pods that die of a word in the prompt."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from proxy.app import App
from tests.helpers.http.support import SSE_HEAD, Pod, Received, event, plain
from tests.helpers.scenarios.disagg import SCHEDULING
from tests.helpers.scenarios.stack import BLIND, BY_LOAD, CHAT, running
from tests.helpers.waiting import until

GOOD = b'{"choices":[{"message":{"content":"ok"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
KEPT = b'{"choices":[{}],"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[1]}}'
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
BEGINNING = SSE_HEAD + event('{"id":"1","choices":[{"index":0,"delta":{"content":"a"}}]}')
PATIENT = {"reliability": {"breaker": {"failures": 1000}, "retries": {"attempts": 3}}}
CONTINUED = {"reliability": {**PATIENT["reliability"], "continuation": {"models": ["*"]}}}
WARM = 4
"""Requests at once to every pod before the test, so that it has idle connections."""


class Mortal(Pod):
    """An engine that crashes of a prompt with `poison` in it, so many seconds after it got it; it serves `slow`
    prompts when `released` is set."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(self._respond)
        self.seconds = seconds
        self.released = asyncio.Event()
        self.prompts: list[bytes] = []
        self.is_dead = False

    async def die(self) -> None:
        """As a process that is killed: the port is closed and all connections are reset."""
        self.is_dead = True
        await self.__aexit__()

    async def _respond(self, request: Received) -> None:
        if request.line.startswith(b"GET"):
            await request.send(plain(b"") if b"/health" in request.line else NOT_FOUND)
            return
        body = await request.body()
        self.prompts.append(body)
        if b"poison" in body:
            await asyncio.sleep(self.seconds)
            if b'"stream":true' in body.replace(b" ", b""):
                await request.send(BEGINNING)
            self.is_dead = True
            self._server.close()
            for task in self._tasks - {asyncio.current_task()}:
                task.cancel()
            request.writer.transport.abort()
        elif b"hang up" in body:
            await asyncio.sleep(self.seconds)
            request.break_off()
        elif b"slow" in body:
            await self.released.wait()
            await request.send(plain(GOOD))
        else:
            await asyncio.sleep(0.02)
            await request.send(plain(KEPT if b"do_remote_decode" in body else GOOD))


@asynccontextmanager
async def fleet(
    pods: Sequence[Mortal], settings: Mapping[str, Any] | None = None, roles: Sequence[str] = ()
) -> AsyncIterator[tuple[App, aiohttp.ClientSession]]:
    """A proxy that has used connections to all pods."""
    async with AsyncExitStack() as stack:
        for pod in pods:
            await stack.enter_async_context(pod)
        each = [{"role": role} for role in roles]
        merged = {**PATIENT, **BLIND, **BY_LOAD, **(settings or {})}
        app = await stack.enter_async_context(running([pod.endpoint.url for pod in pods], merged, each))
        http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{app.port}"))
        for number in itertools.count():
            warm_up = [post(http, f"warm up {number} {each}") for each in range(WARM * len(pods))]
            assert {status for status, _, _ in await asyncio.gather(*warm_up)} == {200}
            if all(pod.prompts for pod in pods):
                break
        for pod in pods:
            pod.prompts.clear()
        yield app, http


async def post(http: aiohttp.ClientSession, text: str, **fields: Any) -> tuple[int, Mapping[str, str], bytes]:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    async with http.post(CHAT, json=body) as response:
        return response.status, response.headers, await response.read()


def dead(pods: Sequence[Mortal]) -> int:
    return sum(pod.is_dead for pod in pods)


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["at once", "after a while"])
async def test_a_poison_request_on_reused_connections_crashes_at_most_two_pods(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    pods = [Mortal(seconds) for _ in range(6)]
    async with fleet(pods) as (_, http):
        status, headers, _ = await post(http, "poison")
        assert (status, headers["x-kvlane-reason"], headers["x-should-retry"]) == (503, "suspected-poison", "false")
        assert dead(pods) == 2
        assert [len(pod.prompts) for pod in pods if pod.prompts] == [1, 1]
        again, _, _ = await post(http, "poison")
        assert (again, dead(pods)) == (503, 2)
        assert (await post(http, "hello"))[0] == 200
    assert any("quarantined for 60 s: 2 pods crashed" in record.getMessage() for record in caplog.records)


REWRITE = {"model": "any", "targets": [{"model": "m"}, {"model": "n"}]}
MODELS = {"models": {"aliases": {"gpt": "m"}, "rewrites": [REWRITE]}}


@pytest.mark.parametrize("name", ["gpt", "any"])
async def test_a_quarantined_request_with_an_alias_or_rewrite_is_refused_again(
    name: str,
) -> None:
    pods = [Mortal() for _ in range(6)]
    async with fleet(pods, MODELS) as (_, http):
        for _ in range(4):
            status, headers, _ = await post(http, "poison", model=name)
            assert (status, headers["x-kvlane-reason"]) == (503, "suspected-poison")
            assert dead(pods) == 2
        assert (await post(http, "hello", model=name))[0] == 200


async def test_a_quarantined_form_with_an_alias_is_refused_again() -> None:
    pods = [Mortal() for _ in range(6)]
    async with fleet(pods, MODELS) as (_, http):
        for _ in range(3):
            form = {"model": "gpt", "file": "poison"}
            kind = {"content-type": "multipart/form-data; boundary=x"}
            parts = (f'--x\r\ncontent-disposition: form-data; name="{key}"\r\n\r\n{form[key]}\r\n' for key in form)
            async with http.post("/v1/audio/transcriptions", data="".join(parts) + "--x--", headers=kind) as response:
                assert (response.status, response.headers["x-kvlane-reason"]) == (503, "suspected-poison")
            assert dead(pods) == 2


async def test_a_hedged_poison_request_crashes_at_most_two_pods() -> None:
    pods = [Mortal(0.2) for _ in range(6)]
    hedged = {"reliability": {**PATIENT["reliability"], "hedging": {"after": "50ms", "budgetPercent": 100}}}
    async with fleet(pods, hedged) as (_, http):
        status, headers, _ = await post(http, "poison")
        assert (status, headers["x-kvlane-reason"]) == (503, "suspected-poison")
        assert dead(pods) == 2


@pytest.mark.parametrize("connector", ["nixl", "p2p-nccl", "mooncake", "sglang"])
async def test_crashes_of_prefill_and_decode_pods_count_together(connector: str) -> None:
    pods = [Mortal(0.05) for _ in range(6)]
    settings = {"scheduling": SCHEDULING, "disaggregation": {"connector": connector}}
    async with fleet(pods, settings, ["prefill"] * 3 + ["decode"] * 3) as (_, http):
        status, headers, _ = await post(http, "poison")
        assert (status, headers["x-kvlane-reason"]) == (503, "suspected-poison")
        assert dead(pods) == 2


async def test_a_request_that_crashes_pods_in_its_streams_is_quarantined_after_the_third() -> None:
    pods = [Mortal() for _ in range(6)]
    async with fleet(pods) as (app, http):
        for _ in range(3):
            status, _, body = await post(http, "poison", stream=True)
            assert (status, b"[DONE]" in body) == (200, False)
            await until(lambda: not app.ledger.in_flight)
        await until(lambda: bool(app.serving.data_port.gateway.failover.quarantine.entries))
        status, headers, _ = await post(http, "poison", stream=True)
        assert (status, headers["x-kvlane-reason"], dead(pods)) == (503, "suspected-poison", 3)
        assert (await post(http, "hello"))[0] == 200


async def test_a_continued_stream_that_crashes_pods_is_quarantined_as_its_client_sends_it() -> None:
    pods = [Mortal() for _ in range(6)]
    async with fleet(pods, CONTINUED) as (_, http):
        status, _, body = await post(http, "poison", stream=True)
        assert (status, b"[DONE]" in body, dead(pods)) == (200, False, 2)
        status, headers, _ = await post(http, "poison", stream=True)
        assert (status, headers["x-kvlane-reason"], dead(pods)) == (503, "suspected-poison", 2)


async def test_a_pod_that_closes_a_reused_connection_after_a_while_has_had_the_request() -> None:
    pods = [Mortal(0.1) for _ in range(5)]
    async with fleet(pods) as (_, http):
        status, _, _ = await post(http, "hang up")
        assert status == 502
        assert sum(len(pod.prompts) for pod in pods) == 3


async def test_no_innocent_request_is_refused_when_two_pods_crash(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pods = [Mortal() for _ in range(4)]
    async with fleet(pods) as (_, http):
        tasks = [asyncio.create_task(post(http, f"slow {number}")) for number in range(12)]
        for victim in pods[:2]:
            await until(lambda: _sent(pods) == 12)
            await victim.die()
        await until(lambda: _sent(pods) == 12)
        for pod in pods:
            pod.released.set()
        assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 12
        assert [(await post(http, f"slow {number}"))[0] for number in range(12)] == [200] * 12
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_poison_request_with_others_is_stopped_and_they_are_served() -> None:
    pods = [Mortal(0.1) for _ in range(6)]
    async with fleet(pods) as (_, http):
        others = [asyncio.create_task(post(http, f"slow {number}")) for number in range(12)]
        await until(lambda: _sent(pods) == 12)
        status, headers, _ = await post(http, "poison")
        assert (status, headers["x-kvlane-reason"]) == (503, "suspected-poison")
        assert dead(pods) == 3, "no pod was idle: two deaths prove nothing"
        for pod in pods:
            pod.released.set()
        assert [status for status, _, _ in await asyncio.gather(*others)] == [200] * 12


async def test_a_poison_request_with_others_is_tried_on_an_idle_pod() -> None:
    pods = [Mortal(0.1) for _ in range(4)]
    async with fleet(pods) as (_, http):
        others = [asyncio.create_task(post(http, f"slow {number}")) for number in range(2)]
        await until(lambda: _sent(pods) == 2)
        poison = asyncio.create_task(post(http, "poison"))
        await until(lambda: dead(pods))
        status, headers, _ = await poison
        assert (status, headers["x-kvlane-reason"], dead(pods)) == (503, "suspected-poison", 2)
        for pod in pods:
            pod.released.set()
        assert [status for status, _, _ in await asyncio.gather(*others)] == [200] * 2


async def test_the_official_client_does_not_retry_a_suspected_request() -> None:
    pods = [Mortal() for _ in range(4)]
    async with (
        fleet(pods) as (app, _),
        AsyncOpenAI(base_url=f"http://127.0.0.1:{app.port}/v1", api_key="none", max_retries=5) as api,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            await api.chat.completions.create(model="m", messages=[{"role": "user", "content": "poison"}])
        assert caught.value.response.headers["x-should-retry"] == "false"
        app.observer.flush()
        assert app._observation.catalogue.refused.cell("suspected-poison").value == 1


def _sent(pods: Sequence[Mortal]) -> int:
    """Prompts that pods have which are alive."""
    return sum(len(pod.prompts) for pod in pods if not pod.is_dead)
