"""Texts have the same tokens in pieces as in one, and pieces that come again are not tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.prefix.hashing import packed
from proxy.prefix.tokenizer import STRETCH, Cutter, PieceCache
from tests.helpers.examples import examples
from tests.helpers.prefix.model import SPECIAL, tokenizers, trained


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [one.ids for one in trained().encode_batch(list(texts), add_special_tokens=False)]


@cache
def cutter(*edges: str) -> Cutter:
    return Cutter(encode, SPECIAL, edges or SPECIAL)


def lines_only() -> Cutter:
    return Cutter(encode, SPECIAL, [])


words = st.sampled_from(
    ["Hello", " ", "  ", "\n", "\n\n", "don't", "été", "日本", "\t", "x=1", "7" * 20, "😀", "<|", "|>", *SPECIAL]
)
texts = st.lists(words, max_size=40).map("".join)


@settings(max_examples=examples(100), deadline=None)
@given(texts)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(text: str) -> None:
    pieces = list(cutter().pieces(text))
    assert "".join(pieces) == text
    assert list(chain.from_iterable(encode(pieces))) == encode([text])[0]


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.text(alphabet="aB \n.7é", min_size=1, max_size=300), max_size=6))
def test_a_long_text_is_split_at_lines_with_the_same_tokens(lines: list[str]) -> None:
    text = "\n".join([line * 40 for line in lines])
    pieces = list(lines_only().pieces(text))
    assert "".join(pieces) == text
    assert list(chain.from_iterable(encode(pieces))) == encode([text])[0]


def test_texts_with_a_common_start_are_split_alike() -> None:
    common = "".join(f"Line {number} of many, with some words in it.\n" for number in range(1000))
    one, other = list(cutter().pieces(common + "One end")), list(cutter().pieces(common + "Another end"))
    assert len(one) > len(common) // (2 * STRETCH)
    assert one[:-1] == other[:-1]


def test_a_grown_conversation_keeps_its_pieces() -> None:
    before = "<|start|>user\nHello<|end|>\n<|start|>assistant\n"
    after = before + "Hi<|end|>\n<|start|>user\nBye<|end|>\n"
    assert list(cutter().pieces(after))[:2] == list(cutter().pieces(before))[:2]


def test_texts_are_not_split_where_tokens_span() -> None:
    """One that puts a space before every text: the second piece would get one that is not there."""
    spaced = tokenizers.Tokenizer.from_str(trained().to_str())
    spaced.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)

    def encode_spaced(given: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in spaced.encode_batch(list(given), add_special_tokens=False)]

    text = "Some words.\n" * 1000
    assert list(Cutter(encode_spaced, SPECIAL, []).pieces(text)) == [text]
    assert len(list(lines_only().pieces(text))) > 1


def test_the_oldest_piece_is_evicted_first() -> None:
    cache = PieceCache(1000)
    for piece in ("a", "b", "c"):
        cache.add(piece, packed([1]))
    assert cache.find(["a", "x"]) == [packed([1]), None]
    cache.add("d" * 100, packed(range(20)))
    assert cache.bytes <= 1000
    assert cache.find(["a", "b"]) == [packed([1]), None]


def test_a_piece_larger_than_the_cache_leaves_it_empty() -> None:
    cache = PieceCache(300)
    cache.add("a" * 1000, b"")
    assert cache.find(["a" * 1000]) == [None]
    assert cache.bytes == 0


def test_token_ids_are_packed_little_endian() -> None:
    assert packed([1, 258]) == b"\1\0\0\0\2\1\0\0"
    with pytest.raises(OverflowError):
        packed([1 << 32])
