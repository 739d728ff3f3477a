from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.lab.sim import Finish, SimConfig, SimEngine, StepTiming
from proxy.lab.sim.sequence import Phase, Sequence
from tests.helpers.examples import examples
from tests.helpers.lab.sim.support import run, sequence


def test_the_time_of_a_step_depends_on_its_tokens_and_sequences() -> None:
    engine = SimEngine(SimConfig(timing=StepTiming(base=1.0, per_prefill_token=0.01, per_sequence=0.1)))
    engine.submit(sequence(50, 2), now=0.0)
    engine.submit(sequence(30, 2, text=b"q"), now=0.0)
    assert engine.step(0.0)[1] == pytest.approx(1.0 + 80 * 0.01 + 2 * 0.1)
    assert engine.step(2.0)[1] == pytest.approx(1.0 + 2 * 0.1)


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget() -> None:
    engine = SimEngine(SimConfig(max_num_batched_tokens=100))
    engine.submit(sequence(250), now=0.0)
    prefills = []
    while engine.busy:
        step = engine.start_step(0.0)
        prefills.append(step.prefill_tokens)
        engine.finish_step(step, 0.0)
    assert prefills == [100, 100, 50]


def test_decoding_continues_during_the_prefill_of_others() -> None:
    engine = SimEngine(SimConfig(max_num_batched_tokens=100))
    decoding = sequence(10, 50)
    engine.submit(decoding, now=0.0)
    engine.step(0.0)
    engine.submit(sequence(250, text=b"q"), now=0.0)
    step = engine.start_step(0.0)
    assert [tokens for _, tokens in step.chunks] == [1, 99]
    assert [output.sequence for output in engine.finish_step(step, 0.0)] == [decoding]


def test_waiting_requests_are_served_in_order_of_arrival() -> None:
    engine = SimEngine(SimConfig(max_num_seqs=1))
    sequences = [sequence(10, 3, text=bytes([65 + index])) for index in range(4)]
    for index, one in enumerate(sequences):
        engine.submit(one, now=float(index))
    run(engine, now=10.0)
    ends = [one.progress.ended for one in sequences]
    assert ends == sorted(ends, key=lambda end: end or 0.0)
    assert len(set(ends)) == 4


def test_running_sequences_are_limited() -> None:
    engine = SimEngine(SimConfig(max_num_seqs=3))
    for index in range(5):
        engine.submit(sequence(10, 5, text=bytes([65 + index])), now=0.0)
    engine.step(0.0)
    assert (len(engine.running), len(engine.waiting)) == (3, 2)


def test_every_running_sequence_gets_one_token_per_step() -> None:
    engine = SimEngine(SimConfig())
    sequences = [sequence(10, 5, text=bytes([65 + index])) for index in range(3)]
    for one in sequences:
        engine.submit(one, now=0.0)
    for tokens in range(1, 6):
        outputs, _ = engine.step(0.0)
        assert [output.sequence for output in outputs] == sequences
        assert {one.progress.generated_tokens for one in sequences} == {tokens}
    assert {one.finish for one in sequences} == {Finish.LENGTH}
    assert not engine.busy


def test_the_youngest_is_preempted_when_blocks_run_out_and_still_gets_its_whole_response() -> None:
    config = SimConfig(num_gpu_blocks=8)
    engine = SimEngine(config)
    older, younger = sequence(60, 60), sequence(60, 60, text=b"q")
    engine.submit(older, now=0.0)
    engine.submit(younger, now=0.0)
    run(engine)
    assert (older.progress.preemptions, younger.progress.preemptions > 0) == (0, True)
    assert engine.stats.preemptions == younger.progress.preemptions
    alone = sequence(60, 60, text=b"q")
    other = SimEngine(config)
    other.submit(alone, now=0.0)
    run(other)
    assert younger.response == alone.response


def test_a_preempted_sequence_is_first_in_the_queue() -> None:
    engine = SimEngine(SimConfig(num_gpu_blocks=8, max_num_seqs=2))
    older, younger, third = sequence(63, 60), sequence(63, 60, text=b"q"), sequence(1, text=b"r")
    for one in (older, younger, third):
        engine.submit(one, now=0.0)
    while not younger.progress.preemptions:
        engine.step(0.0)
    assert list(engine.waiting) == [younger, third]


def test_a_repeated_prompt_is_cached_except_for_its_last_block() -> None:
    engine = SimEngine(SimConfig())
    engine.submit(sequence(64), now=0.0)
    run(engine)
    again = sequence(64)
    engine.submit(again, now=0.0)
    assert engine.start_step(0.0).prefill_tokens == 16
    assert again.progress.cached_tokens == 48
    assert (engine.stats.queried_tokens, engine.stats.hit_tokens) == (128, 48)


def test_the_response_is_cached_for_the_next_turn() -> None:
    engine = SimEngine(SimConfig())
    first = sequence(16, 33)
    engine.submit(first, now=0.0)
    run(engine)
    following = Sequence(first.prompt + first.response + b" and a new question", first.sampling)
    engine.submit(following, now=0.0)
    run(engine)
    assert following.progress.cached_tokens == 48


def test_sequences_with_other_roots_share_nothing() -> None:
    engine = SimEngine(SimConfig())
    for root in (0, 1):
        engine.submit(sequence(64, root=root), now=0.0)
        run(engine)
    assert engine.stats.hit_tokens == 0


def test_the_least_recently_used_block_is_evicted_first() -> None:
    engine = SimEngine(SimConfig(num_gpu_blocks=10))
    for text in (b"a", b"b", b"a", b"c"):
        engine.submit(sequence(64, text=text), now=0.0)
        run(engine)
    kept, forgotten = sequence(64, text=b"a"), sequence(64, text=b"b")
    for one in (kept, forgotten):
        engine.submit(one, now=0.0)
        run(engine)
    assert kept.progress.cached_tokens == 48
    assert forgotten.progress.cached_tokens < 48


def test_only_blocks_of_running_sequences_count_as_used() -> None:
    engine = SimEngine(SimConfig(num_gpu_blocks=8))
    engine.submit(sequence(64, 2), now=0.0)
    engine.step(0.0)
    assert engine.kv_usage == 0.5
    run(engine)
    assert engine.kv_usage == 0.0
    assert engine.pool.idle == 4


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_sequence_leaves_no_block(steps: int) -> None:
    engine = SimEngine(SimConfig(max_num_batched_tokens=100))
    gone = sequence(150, 50)
    engine.submit(gone, now=0.0)
    for _ in range(steps):
        engine.step(0.0)
    engine.abort(gone, now=1.0)
    engine.abort(gone, now=2.0)
    assert (engine.busy, engine.kv_usage, engine.stats.aborted, gone.progress.ended) == (False, 0.0, 1, 1.0)


def test_a_sequence_aborted_within_a_step_gets_no_token_of_it() -> None:
    engine = SimEngine(SimConfig())
    gone, other = sequence(10, 5), sequence(10, 5, text=b"q")
    engine.submit(gone, now=0.0)
    engine.submit(other, now=0.0)
    step = engine.start_step(0.0)
    engine.abort(gone, now=0.0)
    assert [output.sequence for output in engine.finish_step(step, 0.0)] == [other]


def test_a_prompt_without_output_is_computed_and_ends() -> None:
    engine = SimEngine(SimConfig())
    read = sequence(100, 0)
    engine.submit(read, now=0.0)
    (output,), _ = engine.step(0.0)
    assert (output.text, read.phase) == (b"", Phase.ENDED)
    assert (engine.stats.prompt_tokens, engine.stats.generation_tokens) == (100, 0)


@settings(deadline=None, max_examples=examples(50))
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 30), st.sampled_from(b"abc")), max_size=12),
    blocks=st.integers(8, 20),
    sequences=st.integers(1, 4),
    aborted=st.sets(st.integers(0, 11)),
)
def test_with_any_arrivals_all_sequences_end_and_all_blocks_are_freed(
    arrivals: list[tuple[int, int, int]], blocks: int, sequences: int, aborted: set[int]
) -> None:
    engine = SimEngine(SimConfig(num_gpu_blocks=blocks, max_num_seqs=sequences, max_num_batched_tokens=40))
    everybody = []
    for prompt, reply, text in arrivals:
        everybody.append(sequence(prompt, reply, text=bytes([text])))
        engine.submit(everybody[-1], now=0.0)
        engine.step(0.0)
        assert engine.pool.used + engine.pool.idle <= blocks
    for index in aborted & set(range(len(everybody))):
        engine.abort(everybody[index], now=0.0)
    run(engine)
    assert engine.pool.used == 0
    for index, one in enumerate(everybody):
        assert one.phase is Phase.ENDED
        if index not in aborted:
            assert one.progress.generated_tokens == one.sampling.max_tokens
