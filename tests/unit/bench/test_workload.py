from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from bench.placement.capacity import capacity
from bench.placement.generators import GENERATORS, generate
from bench.placement.pods import VirtualPod
from bench.placement.report import reusable_share
from proxy.lab.sim import SimConfig
from proxy.lab.workload import (
    CHUNK,
    Job,
    Workload,
    load_trace,
    named,
    prompt_blocks,
    prompt_text,
    request_body,
)
from proxy.openai.parse import parse

ROWS = [
    {"timestamp": 0, "input_length": 1_000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 2]},
    {"timestamp": 0, "input_length": 1_500, "output_length": 9, "hash_ids": [0, 1, 3]},
    {"timestamp": 3_000, "input_length": 500, "output_length": 7, "hash_ids": [9]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "little.jsonl.gz"
    with gzip.open(path, "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in ROWS)
    return path


def test_simultaneous_arrivals_are_spread_over_the_bucket(trace: Path) -> None:
    workload = load_trace(trace, Random(1))
    arrivals = [job.arrival for job in workload.jobs]
    assert arrivals == sorted(arrivals)
    assert len(set(arrivals)) == 4
    assert max(arrivals[:3]) < 3.0 <= arrivals[3]
    assert workload.name == "little"


def test_every_response_has_at_least_one_token(trace: Path) -> None:
    assert min(job.output_tokens for job in load_trace(trace, Random(1)).jobs) == 1


def test_time_is_scaled_to_the_requested_rate(trace: Path) -> None:
    scaled = load_trace(trace, Random(1)).at_rate(8.0)
    assert scaled.rate == pytest.approx(8.0)
    assert scaled.jobs[0].arrival == 0.0


def test_equal_chunks_after_different_text_are_different_blocks() -> None:
    one, other, again = named([Job(0, 1024, 1, (1, 7)), Job(1, 1024, 1, (2, 7)), Job(2, 1024, 1, (1, 7))])
    assert one.nodes == again.nodes
    assert one.nodes[1] != other.nodes[1]


def test_reuse_counts_whole_prefixes_only() -> None:
    jobs = named([Job(0, 1000, 1, (1, 2)), Job(1, 1000, 1, (1, 3)), Job(2, 1000, 1, (4, 2))])
    assert reusable_share(jobs) == pytest.approx(512 / 3000)


def test_prompts_share_text_exactly_as_far_as_they_share_blocks() -> None:
    rng = Random(2)
    jobs = named(generate("conversations", 60, 10.0, rng).jobs)
    for one, other in zip(jobs, jobs[7:], strict=False):
        shared_text = next(
            (at for at, (a, b) in enumerate(zip(prompt_text(one), prompt_text(other), strict=False)) if a != b),
            min(len(prompt_text(one)), len(prompt_text(other))),
        )
        shared_blocks = sum(
            min(a[1], b[1])
            for a, b in zip(prompt_blocks(one, 16), prompt_blocks(other, 16), strict=False)
            if a[0] == b[0]
        )
        assert shared_blocks == shared_text // 4 // 16


def test_router_and_engine_get_the_same_prompt() -> None:
    (job,) = named([Job(0, 700, 33, (1, 2))])
    parsed = parse("/v1/completions", request_body(job, "sim"), "application/json")
    assert parsed.prompt.parts == (prompt_text(job),)
    assert parsed.prompt.tokens == 700
    assert (parsed.model, parsed.max_tokens, parsed.stream) == ("sim", 33, True)


def test_a_window_of_the_trace_is_contiguous() -> None:
    workload = Workload("w", named([Job(float(at), 10, 1, (at,)) for at in range(10)]))
    assert [job.arrival for job in workload.window(3, 4).jobs] == [3.0, 4.0, 5.0, 6.0]


def test_requests_too_large_for_every_pod_are_left_out() -> None:
    workload = Workload("w", named([Job(0, 10, 1, (1,)), Job(1, 1_000, 30, (2, 3))]))
    assert [job.prompt_tokens for job in workload.fitting(1_029).jobs] == [10]


@pytest.mark.parametrize("name", GENERATORS)
def test_generated_requests_are_ordered_at_the_requested_rate_and_repeatable(name: str) -> None:
    made = generate(name, 1_500, 20.0, Random(4))
    assert made == generate(name, 1_500, 20.0, Random(4))
    assert made != generate(name, 1_500, 20.0, Random(5))
    arrivals = [job.arrival for job in made.jobs]
    assert arrivals == sorted(arrivals)
    assert 12.0 < made.rate < 30.0
    assert all(0 < job.prompt_tokens <= len(job.ids) * CHUNK for job in made.jobs)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("shared-prompt", 0.9, 1.0),
        ("conversations", 0.7, 0.95),
        ("agents", 0.85, 0.97),
        ("bimodal", 0.0, 0.0),
        ("day", 0.55, 0.85),
    ],
)
def test_generated_traffic_shares_the_expected_share(name: str, least: float, most: float) -> None:
    assert least <= reusable_share(generate(name, 2_000, 20.0, Random(4)).jobs) <= most


def test_twice_the_pods_have_twice_the_capacity() -> None:
    jobs = generate("bimodal", 600, 20.0, Random(4)).jobs
    config = SimConfig(num_gpu_blocks=25_000, max_num_seqs=8)

    def most(pods: int) -> float:
        return capacity(jobs, [VirtualPod(index, config) for index in range(pods)])

    assert most(4) == pytest.approx(2 * most(2), rel=0.1)
