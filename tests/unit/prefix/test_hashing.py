from itertools import accumulate, pairwise
from operator import eq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from proxy.core.request import BYTES_PER_TOKEN, Prompt
from proxy.prefix.hashing import DEPTHS, PER_DOUBLING, chain, chains, cuts, last_turn, namespace

DEPTHS_OF_ANY_KIND = st.lists(st.integers(1, 9), max_size=20).map(lambda sizes: [0, *accumulate(sizes)])


def link_by_link(part: bytes, seed: int, depths: list[int], block_bytes: int) -> list[int]:
    hashes: list[int] = []
    for start, end in pairwise(depths):
        if piece := part[start * block_bytes : end * block_bytes]:
            seed = xxh3_64_intdigest(piece, seed=seed)
            hashes.append(seed)
    return hashes


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), DEPTHS_OF_ANY_KIND, st.integers(1, 9))
def test_each_hash_of_a_chain_is_seeded_with_the_previous_one(
    part: bytes, seed: int, depths: list[int], size: int
) -> None:
    assert chain(part, seed, cuts(depths, size)) == link_by_link(part, seed, depths, size)


@given(st.binary(max_size=100), st.binary(max_size=100), DEPTHS_OF_ANY_KIND, st.integers(1, 9))
def test_two_chains_share_exactly_their_common_pieces(a: bytes, b: bytes, depths: list[int], size: int) -> None:
    one, other = (chain(part, 1, cuts(depths, size)) for part in (a, b))
    for at in range(max(len(one), len(other))):
        same = a[: depths[at + 1] * size] == b[: depths[at + 1] * size]
        assert (one[at : at + 1] == other[at : at + 1]) == same


def test_deep_hashes_cover_several_blocks_up_to_a_32nd_of_the_prompt_before() -> None:
    assert list(DEPTHS[:65]) == list(range(65))
    assert all(0 < end - start <= max(1, start // PER_DOUBLING) for start, end in pairwise(DEPTHS))
    assert (DEPTHS[160], DEPTHS[224]) == (512, 2048)


@pytest.mark.parametrize("blocks", [1, 63, 64, 65, 66, 67, 127, 128, 129, 1000])
def test_prompts_that_differ_deep_down_share_their_start(blocks: int) -> None:
    """They part with the first byte after so many blocks."""
    size = 64 * BYTES_PER_TOKEN
    start = b"x" * blocks * size
    (one,), (other,) = (chains(Prompt((start + end * 3 * size,)), "m", 64, 2048) for end in (b"a", b"b"))
    common = sum(map(eq, one, other))
    assert one[:common] == other[:common]
    assert DEPTHS[common] <= blocks < DEPTHS[common + 1]


@given(st.integers(0, 400), st.integers(1, 300))
def test_hashed_blocks_are_limited(blocks: int, limit: int) -> None:
    hashes = [len(one) for one in chains(Prompt((b"x" * blocks * 256,)), "m", 64, limit)]
    assert sum(DEPTHS[one] for one in hashes) <= limit
    if blocks:
        assert DEPTHS[hashes[0] + 1] > min(blocks, limit)


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_a_namespace_is_one_model_with_one_salt(model: str, salt: str, other: str, other_salt: str) -> None:
    same = (model, salt) == (other, other_salt)
    assert (namespace(model, salt) == namespace(other, other_salt)) == same


def test_moving_text_between_model_and_salt_is_another_namespace() -> None:
    assert namespace("ab", "c") != namespace("a", "bc") != namespace("abc", "")
    assert namespace("a", "1:b") != namespace("a1:b", "")


def test_lone_surrogates_are_hashed_like_any_text() -> None:
    assert namespace("\ud800", "") != namespace("", "\ud800")


def test_every_part_of_a_batch_starts_its_own_chain() -> None:
    alone = chains(Prompt((b"x" * 300,)), "m", 64, 10)
    batch = chains(Prompt((b"x" * 300, b"y", b"x" * 300)), "m", 64, 10)
    assert (batch[0], batch[2]) == (alone[0], alone[0])
    assert [len(one) for one in batch] == [2, 1, 2]


def test_the_limit_applies_to_the_whole_request() -> None:
    prompt = Prompt((b"x" * 600, b"y" * 600, b"z"))
    assert [len(one) for one in chains(prompt, "m", 64, 4)] == [3, 1]


def test_deep_blocks_of_a_batch_count_in_full_against_the_limit() -> None:
    prompt = Prompt((b"x" * 100 * 256, b"y" * 100 * 256, b"z" * 256))
    assert [DEPTHS[len(one)] for one in chains(prompt, "m", 64, 167)] == [100, 66, 1]
    assert [DEPTHS[len(one)] for one in chains(prompt, "m", 64, 166)] == [100, 66]


def test_empty_parts_have_no_chain() -> None:
    assert chains(Prompt((b"", b"x", b"")), "m", 64, 10) == chains(Prompt((b"x",)), "m", 64, 10)
    assert chains(Prompt(), "m", 64, 10) == ()


def test_hashes_are_the_same_in_every_process() -> None:
    assert namespace("model", "salt") == 7939720834766408479
    assert chain(b"hello world", 0, cuts(range(3), 8)) == [7220761301581054836, 3351644343595789659]


@given(st.binary(max_size=40_000), st.binary(max_size=900), st.binary(max_size=300))
def test_a_turn_names_the_prompt_before_its_last_response(raw: bytes, response: bytes, question: bytes) -> None:
    before = b"user\n" + raw.replace(b"\n", b" ") + b"\n"
    with_response = before + b"assistant\n" + response.replace(b"\n", b" ")
    whole = with_response + b"\nuser\n" + question.replace(b"\n", b" ") + b"\n"
    (earlier,), (later,) = chains(Prompt((before,)), "m", 64, 2048), chains(Prompt((whole,)), "m", 64, 2048)
    turn = last_turn(whole, "m", "", later, 64, 2048)
    assert turn is not None
    assert turn.key == earlier[-1]
    assert later[: turn.hashes] == earlier[: turn.hashes]
    assert len(earlier) - turn.hashes in (0, 1)
    assert turn.blocks == len(with_response) // 256
    assert turn.response_bytes == len(response)


def test_a_turn_beyond_the_hashed_part_is_none() -> None:
    whole = b"user\n" + b"x" * 2000 + b"\nassistant\nhello\nuser\nyes\n"
    (hashes,) = chains(Prompt((whole,)), "m", 64, 4)
    assert last_turn(whole, "m", "", hashes, 64, 4) is None
    assert last_turn(b"user\nhello\n", "m", "", [1], 64, 4) is None
