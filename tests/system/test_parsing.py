from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import orjson
import pytest

from proxy.core.errors import BadRequest, BodyTooLarge, InvalidJson
from proxy.core.ports import Identity
from proxy.openai.parse import parse
from proxy.parsing import (
    MOST,
    MOST_PARTS,
    QUICK,
    BodyParser,
    is_large_form,
    may_parse_here,
    parse_here,
    parsed_form,
)
from tests.helpers.waiting import until

CHAT = "/v1/chat/completions"


def chat(size: int = 10, **fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}], **fields})


def process_of(parser: BodyParser) -> Process | None:
    """That of small bodies."""
    process: Process | None = parser._workers[0].process
    return process


def worker_pids(parser: BodyParser) -> list[int]:
    return [each.process.pid for each in parser._workers if each.process is not None]


async def stopped(parser: BodyParser) -> list[int]:
    """Start both processes and stop them with a signal, so that what they are given is never parsed."""
    await asyncio.gather(parser.parse_apart(CHAT, chat(), ""), parser.parse_apart(CHAT, chat(), ""))
    for pid in worker_pids(parser):
        os.kill(pid, signal.SIGSTOP)
    return worker_pids(parser)


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    async with BodyParser() as parser:
        yield parser


@pytest.mark.parametrize(
    "body",
    [chat(), chat(1_500_000, stream=True, max_tokens=7), chat(kv_transfer_params={"host": "x"}), b'{"prompt": "x"}'],
    ids=["small", "large", "with an engine's internals", "without a model"],
)
async def test_results_equal_those_of_the_parser(parser: BodyParser, body: bytes) -> None:
    path = CHAT if b"messages" in body else "/v1/completions"

    assert await parser.parse_apart(path, body, "application/json") == parse(path, body)


async def test_the_start_of_a_prompt_beyond_the_hashed_length_is_returned(parser: BodyParser) -> None:
    for path, body in (
        (CHAT, chat(3_000_000)),
        ("/v1/completions", orjson.dumps({"model": "m", "prompt": ["x" * 1_500_000] * 3})),
    ):
        here, apart = parse(path, body), await parser.parse_apart(path, body, "application/json")

        assert (apart.model, apart.body, apart.prompt.tokens) == (here.model, here.body, here.prompt.tokens)
        assert len(apart.prompt.parts) == len(here.prompt.parts)
        assert sum(map(len, apart.prompt.parts)) == MOST
        assert all(map(bytes.startswith, here.prompt.parts, apart.prompt.parts))


async def test_the_messages_of_parser_errors_are_kept(parser: BodyParser) -> None:
    for body, kind in (
        (b"{", InvalidJson),
        (b'{"model": 1}', BadRequest),
        (b'{"model": "m", "stream": 1}', BadRequest),
    ):
        with pytest.raises(kind) as here:
            parse(CHAT, body)
        with pytest.raises(kind) as apart:
            await parser.parse_apart(CHAT, body, "application/json")

        assert (apart.value.message, apart.value.param) == (here.value.message, here.value.param)


@pytest.mark.smoke
async def test_concurrent_bodies_are_parsed_in_turn(parser: BodyParser) -> None:
    bodies = [chat(size * 100_000) for size in range(1, 6)]

    found = await asyncio.gather(*(parser.parse_apart(CHAT, body, "") for body in bodies))

    assert found == [parse(CHAT, body) for body in bodies]


async def test_an_abandoned_request_does_not_shift_the_results_of_others(parser: BodyParser) -> None:
    await parser.parse_apart(CHAT, chat(), "")
    first = asyncio.get_running_loop().create_task(parser.parse_apart(CHAT, chat(2_000_000), ""))
    await asyncio.sleep(0.001)
    first.cancel()

    body = chat(17)
    assert await parser.parse_apart(CHAT, body, "") == parse(CHAT, body)
    assert first.cancelled()


async def test_a_crashed_process_loses_no_request(parser: BodyParser) -> None:
    body = chat(1000)
    await parser.parse_apart(CHAT, body, "")
    process = process_of(parser)
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)

    assert await parser.parse_apart(CHAT, body, "") == parse(CHAT, body)
    assert await parser.parse_apart(CHAT, body, "") == parse(CHAT, body)
    (pid,) = worker_pids(parser)
    assert pid != process.pid


async def test_the_process_ends_with_its_owner() -> None:
    async with BodyParser() as parser:
        await parser.parse_apart(CHAT, chat(), "")
        process = process_of(parser)
    assert process is not None
    assert process.returncode is not None


async def test_no_process_starts_without_large_bodies() -> None:
    async with BodyParser() as parser:
        assert worker_pids(parser) == []


async def test_a_queued_body_whose_client_leaves_is_not_parsed(parser: BodyParser) -> None:
    pids = await stopped(parser)
    given = parser.given
    begun = [asyncio.create_task(parser.parse_apart(CHAT, chat(), "")) for _ in range(2)]
    waiting = [asyncio.create_task(parser.parse_apart(CHAT, chat(100_000), "")) for _ in range(12)]
    await until(lambda: parser.waiting == 12)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert parser.waiting == 0
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert await asyncio.gather(*begun) == [parse(CHAT, chat())] * 2
    assert parser.given == given + 2


async def test_a_process_freed_as_its_waiting_client_leaves_parses_the_next_body(
    parser: BodyParser,
) -> None:
    for worker in parser._workers:
        worker.is_busy = True
    leaving, next_one = (asyncio.create_task(parser.parse_apart(CHAT, chat(), "")) for _ in range(2))
    await until(lambda: parser.waiting == 2)
    leaving.cancel()
    parser._release(parser._workers[0])

    assert await next_one == parse(CHAT, chat())
    await asyncio.gather(leaving, return_exceptions=True)
    assert not parser._workers[0].is_busy
    assert parser.waiting == 0


async def test_a_body_whose_client_leaves_during_parsing_is_abandoned_for_the_next(
    parser: BodyParser,
) -> None:
    await stopped(parser)
    leaving = asyncio.create_task(parser.parse_apart(CHAT, chat(QUICK), ""))
    await until(lambda: parser._workers[1].is_busy)
    leaving.cancel()

    assert (await parser.parse_apart(CHAT, chat(QUICK + 1), "")).model == "m"


async def test_parsing_a_large_body_does_not_delay_smaller_ones(parser: BodyParser) -> None:
    pids = await stopped(parser)
    os.kill(pids[0], signal.SIGCONT)
    large = [asyncio.create_task(parser.parse_apart(CHAT, chat(QUICK), "")) for _ in range(3)]
    await until(lambda: parser.waiting == 2)

    assert await parser.parse_apart(CHAT, chat(300_000), "") == parse(CHAT, chat(300_000))
    assert not any(task.done() for task in large)
    for task in large:
        task.cancel()


async def test_a_body_that_crashes_processes_is_refused(parser: BodyParser) -> None:
    task = asyncio.create_task(parser.parse_apart(CHAT, chat(QUICK), ""))
    killed: set[int] = set()
    while not task.done():
        for pid in set(worker_pids(parser)) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        await asyncio.sleep(0.001)
    with pytest.raises(BodyTooLarge):
        await task
    assert len(killed) == 2


async def test_the_first_of_very_many_parts_are_returned(parser: BodyParser) -> None:
    body = orjson.dumps({"prompt": ["a"] * (MOST_PARTS + 10)})

    assert len((await parser.parse_apart("/v1/completions", body, "")).prompt.parts) == MOST_PARTS


@dataclass
class Sent:
    """A client's request."""

    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    method: str = "POST"
    path: str = "/v1/audio/transcriptions"
    query: str = ""
    upload: object | None = None
    id: str = "id"
    received_at: float = 0.0
    identity: Identity | None = None
    refusal: str = ""
    model: str = ""


FORM = {"content-type": "multipart/form-data; boundary=B"}
NAMED = b'--B\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n'
DASHES = b'--B\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"-- " * 100_000


async def test_a_large_form_is_read_completely_and_the_start_of_a_streamed_one() -> None:
    whole, beginning = Sent(NAMED + DASHES + b"\r\n--B--\r\n", FORM), Sent(NAMED + DASHES, FORM, upload=object())
    for client_request in (whole, beginning):
        assert is_large_form(client_request)
        assert (await parsed_form(client_request)).model == "m"
    with pytest.raises(BadRequest, match="last boundary"):
        await parsed_form(Sent(NAMED + DASHES, FORM))


def test_a_request_with_the_model_in_its_query_ignores_the_size_of_its_body() -> None:
    for headers in ({}, FORM):
        client_request = Sent(chat(1_000_000), headers, "GET", "/v1/realtime", "?model=other")
        assert not is_large_form(client_request)
        assert may_parse_here(client_request)
        assert parse_here(client_request).model == "other"


def test_a_query_that_names_two_models_is_refused() -> None:
    for query in ("?model=a&model=b", "?model=a&mod%65l=b", "?model=a&model="):
        with pytest.raises(BadRequest, match="more than one 'model'"):
            parse_here(Sent(b"", {}, "GET", "/v1/realtime", query))
