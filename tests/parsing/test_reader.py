from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import orjson
import pytest

from proxy.core.errors import BadRequest, InvalidJson
from proxy.openai.parse import parse
from proxy.parsing.reader import BodyParser
from proxy.parsing.wire import MOST

CHAT = "/v1/chat/completions"


def chat(size: int = 10, **fields: object) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}], **fields})


@pytest.fixture
async def parser() -> AsyncIterator[BodyParser]:
    async with BodyParser() as parser:
        yield parser


@pytest.mark.parametrize(
    "body",
    [chat(), chat(1_500_000, stream=True, max_tokens=7), chat(kv_transfer_params={"host": "x"}), b'{"prompt": "x"}'],
    ids=["small", "large", "with an engine's internals", "without a model"],
)
async def test_what_comes_back_is_what_the_parser_gives(parser: BodyParser, body: bytes) -> None:
    path = CHAT if b"messages" in body else "/v1/completions"

    assert await parser.parse_apart(path, body, "application/json") == parse(path, body)


async def test_of_a_prompt_that_is_longer_than_anything_hashed_the_beginning_comes_back(parser: BodyParser) -> None:
    for path, body in (
        (CHAT, chat(3_000_000)),
        ("/v1/completions", orjson.dumps({"model": "m", "prompt": ["x" * 1_500_000] * 3})),
    ):
        here, apart = parse(path, body), await parser.parse_apart(path, body, "application/json")

        assert (apart.model, apart.body, apart.prompt.tokens) == (here.model, here.body, here.prompt.tokens)
        assert len(apart.prompt.parts) == len(here.prompt.parts)
        assert sum(map(len, apart.prompt.parts)) == MOST
        assert all(map(bytes.startswith, here.prompt.parts, apart.prompt.parts))


async def test_what_the_parser_refuses_is_refused_with_the_same_words(parser: BodyParser) -> None:
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


async def test_bodies_that_come_at_once_are_read_one_after_the_other(parser: BodyParser) -> None:
    bodies = [chat(size * 100_000) for size in range(1, 6)]

    found = await asyncio.gather(*(parser.parse_apart(CHAT, body, "") for body in bodies))

    assert found == [parse(CHAT, body) for body in bodies]


async def test_a_request_that_is_given_up_does_not_shift_the_answers_of_others(parser: BodyParser) -> None:
    await parser.parse_apart(CHAT, chat(), "")
    first = asyncio.get_running_loop().create_task(parser.parse_apart(CHAT, chat(2_000_000), ""))
    await asyncio.sleep(0.001)
    first.cancel()

    body = chat(17)
    assert await parser.parse_apart(CHAT, body, "") == parse(CHAT, body)
    assert first.cancelled()


async def test_a_process_that_dies_costs_no_request(parser: BodyParser) -> None:
    body = chat(1000)
    await parser.parse_apart(CHAT, body, "")
    process = parser._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)

    assert await parser.parse_apart(CHAT, body, "") == parse(CHAT, body)
    assert await parser.parse_apart(CHAT, body, "") == parse(CHAT, body)
    assert parser._process is not None
    assert parser._process.pid != process.pid


async def test_the_process_ends_with_its_owner() -> None:
    async with BodyParser() as parser:
        await parser.parse_apart(CHAT, chat(), "")
        process = parser._process
    assert process is not None
    assert process.returncode is not None


async def test_nothing_is_started_for_those_who_send_no_large_bodies() -> None:
    async with BodyParser() as parser:
        assert parser._process is None
