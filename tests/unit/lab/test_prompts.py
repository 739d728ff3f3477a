"""Requests are given text again: the proxy under test hashes it, and finds in common what was in common."""

from __future__ import annotations

from itertools import pairwise, takewhile
from random import Random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.request import Prompt
from proxy.lab.record import load
from proxy.lab.workload import Job, RequestParams, blocks_with_response, named, prompt_blocks, prompt_text, request_body
from proxy.prefix.hashing import chains
from proxy.telemetry.recorder import BLOCK_TOKENS, MOST_BLOCKS, Salt
from tests.helpers.examples import examples
from tests.helpers.lab.traffic import head, request, written

SALT = Salt(b"secret")

sentences = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def prompt(sentence: list[int]) -> bytes:
    """Words of 100 to 6,100 bytes."""
    return b"".join(b"%d" % word * (100 + 2_000 * word) for word in sentence)


def hashed(part: bytes) -> list[int]:
    (chain,) = chains(Prompt((part,)), "sim", BLOCK_TOKENS, MOST_BLOCKS)
    return chain


def common(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(sentences, min_size=2, max_size=4))
def test_texts_share_what_the_prompts_shared(tmp_path_factory: pytest.TempPathFactory, parsed: list[list[int]]) -> None:
    prompts = [prompt(sentence) for sentence in parsed]
    lines = [
        request(float(at), chain=[SALT.chain(hashed(one))], estimated_tokens=-(-len(one) // 4), prompt_tokens=len(one))
        for at, one in enumerate(prompts)
    ]
    path = written(tmp_path_factory.mktemp("record") / "r.jsonl", [head(), *lines])
    texts = [prompt_text(job) for job in load([path], Random(0)).workload.jobs]
    for (was, other_was), (now, other_now) in zip(pairwise(prompts), pairwise(texts), strict=True):
        assert abs(len(now) - len(was)) < 4
        assert common(hashed(now), hashed(other_now)) == common(hashed(was), hashed(other_was))


@settings(deadline=None)
@given(st.integers(1, 5_000), st.floats(0.5, 1.5), st.integers(2, 40))
def test_all_whole_blocks_of_a_prompt_have_names(tokens: int, scale: float, pieces: int) -> None:
    ends = tuple(64 * at for at in range(1, pieces + 1))
    nodes = tuple(range(pieces))
    job = Job(0.0, max(1, int(tokens * scale)), 5, nodes, nodes, ends=ends, text_tokens=tokens, scale=scale)
    assert sum(blocks for _, blocks in prompt_blocks(job, 16)) == job.prompt_tokens // 16


def test_a_piece_ends_at_the_same_place_in_every_continuation() -> None:
    shared = (0, 1, 2)
    ends = (64, 128, 192, 256)
    short = Job(0.0, 150, 1, (*shared, 3), (*shared, 3), ends=ends, text_tokens=200, scale=0.75)
    long = Job(0.0, 180, 1, (*shared, 4), (*shared, 4), ends=ends, text_tokens=240, scale=0.75)
    assert prompt_blocks(short, 16)[:3] == prompt_blocks(long, 16)[:3]


def test_a_later_prompt_that_continues_the_response_finds_it() -> None:
    (job,) = named([Job(0.0, 600, 500, (1, 2), continued=(1, 2, 3))])
    assert sum(blocks for _, blocks in blocks_with_response(job, 16)) == 1_099 // 16
    (alone,) = named([Job(0.0, 600, 500, (1, 2))])
    assert blocks_with_response(alone, 16) == ()


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        (RequestParams(), {"stream": True, "max_tokens": 9}),
        (RequestParams(stream=False, max_tokens=50), {"stream": False, "max_tokens": 50}),
        (RequestParams(max_tokens=0), {"stream": True}),
    ],
)
def test_the_body_has_the_parameters_of_the_client(params: RequestParams, fields: dict[str, object]) -> None:
    parsed = orjson.loads(request_body(Job(0.0, 100, 9, (1,), params=params), "sim"))
    assert len(parsed.pop("prompt")) == 400
    parsed.pop("stream_options", None)
    assert parsed == {"model": "sim", "ignore_eos": True, **fields}
