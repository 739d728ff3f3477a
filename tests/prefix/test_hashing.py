from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from proxy.core.request import Prompt
from proxy.prefix.hashing import chain, chains, namespace

WHATEVER = 1 << 20


def link_by_link(part: bytes, seed: int, block_bytes: int) -> list[int]:
    hashes: list[int] = []
    for start in range(0, len(part), block_bytes):
        seed = xxh3_64_intdigest(part[start : start + block_bytes], seed=seed)
        hashes.append(seed)
    return hashes


@given(st.binary(max_size=200), st.integers(0, 2**64 - 1), st.integers(1, 50), st.integers(0, 20))
def test_a_chain_is_every_block_seeded_with_the_one_before(part: bytes, seed: int, size: int, limit: int) -> None:
    assert chain(part, seed, size, limit) == link_by_link(part, seed, size)[:limit]


@given(st.binary(max_size=100), st.binary(max_size=100), st.integers(1, 16))
def test_two_chains_share_exactly_the_blocks_up_to_where_the_prompts_part(a: bytes, b: bytes, size: int) -> None:
    one, other = chain(a, 1, size, WHATEVER), chain(b, 1, size, WHATEVER)
    for at in range(max(len(one), len(other))):
        same = a[: (at + 1) * size] == b[: (at + 1) * size]
        assert (one[at : at + 1] == other[at : at + 1]) == same


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


def test_the_limit_holds_for_a_request_as_a_whole() -> None:
    prompt = Prompt((b"x" * 600, b"y" * 600, b"z"))
    assert [len(one) for one in chains(prompt, "m", 64, 4)] == [3, 1]


def test_empty_parts_have_no_chain() -> None:
    assert chains(Prompt((b"", b"x", b"")), "m", 64, 10) == chains(Prompt((b"x",)), "m", 64, 10)
    assert chains(Prompt(), "m", 64, 10) == ()


def test_hashes_are_the_same_in_every_process() -> None:
    assert namespace("model", "salt") == 7939720834766408479
    assert chain(b"hello world", 0, 8, 9) == [7220761301581054836, 3351644343595789659]
