from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from proxy.lab.sim import Finish, SamplingParams, Sequence
from proxy.lab.sim.sequence import WORDS, Output, tokens_in

LONG = SamplingParams(max_tokens=40)


def written(prompt: bytes, sampling: SamplingParams) -> tuple[Sequence, list[Output]]:
    sequence = Sequence(prompt, sampling)
    outputs = [sequence.grow()]
    while outputs[-1].finish is None:
        outputs.append(sequence.grow())
    return sequence, outputs


def test_every_word_is_a_token_of_four_bytes_that_starts_with_a_space() -> None:
    assert len(set(WORDS)) == 64
    assert all(len(word) == 4 and word.startswith(b" ") for word in WORDS)


@given(prompt=st.binary(max_size=200), cut=st.integers(0, 39))
def test_a_continued_response_ends_with_exactly_the_words_that_were_missing(prompt: bytes, cut: int) -> None:
    whole, _ = written(prompt, LONG)
    written_before = whole.response[: 4 * cut]
    rest, _ = written(prompt + written_before, SamplingParams(max_tokens=40 - cut))
    assert written_before + rest.response == whole.response


def test_other_prompts_and_other_seeds_get_other_responses() -> None:
    replies = [written(b"one", LONG), written(b"two", LONG), written(b"one", replace(LONG, seed=1))]
    assert len({sequence.response for sequence, _ in replies}) == 3


@given(start=st.integers(0, 30), length=st.integers(1, 12), include=st.booleans())
def test_a_stop_string_ends_the_response_and_is_never_shown(start: int, length: int, include: bool) -> None:
    whole = written(b"prompt", LONG)[0].response
    stop = whole[start : start + length]
    sequence, outputs = written(b"prompt", replace(LONG, stop=(stop, b"never"), include_stop=include))
    end = whole.find(stop) + (len(stop) if include else 0)
    assert sequence.response == b"".join(output.text for output in outputs) == whole[:end]
    assert (sequence.finish, sequence.stop_reason) == (Finish.STOP, stop.decode())


def test_a_stop_string_is_ignored_before_min_tokens() -> None:
    whole = written(b"prompt", LONG)[0].response
    sequence, _ = written(b"prompt", replace(LONG, stop=(whole[:4],), min_tokens=10))
    assert sequence.progress.generated_tokens > 10


def test_a_response_with_a_script_is_that_script() -> None:
    sequence, _ = written(b"p", replace(LONG, script=b'{"a": 1}  x'))
    assert (sequence.response, sequence.finish) == (b'{"a": 1}  x', Finish.STOP)


@given(prompt=st.binary(max_size=300), reply=st.integers(1, 60))
def test_block_hashes_of_generated_text_equal_those_of_the_same_prompt(prompt: bytes, reply: int) -> None:
    grown, _ = written(prompt, SamplingParams(max_tokens=reply))
    grown.extend_hashes(4)
    given = Sequence(prompt + grown.response, LONG)
    given.extend_hashes(4)
    assert grown.hashes == given.hashes
    assert grown.tokens == tokens_in(prompt + grown.response)
