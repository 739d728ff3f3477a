from __future__ import annotations

import gzip
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from proxy.lab.record import TraceRecord, load
from proxy.lab.workload import BadTrace
from tests.helpers.lab.traffic import head, request, written


def read(path: Path, *lines: dict[str, Any]) -> TraceRecord:
    return load([written(path / "r.jsonl", [head(), *lines])], Random(0))


def test_a_request_is_replayed_with_its_times_lengths_and_objectives(tmp_path: Path) -> None:
    record = read(tmp_path, request(2.5, max_tokens=64, slo_ttft=0.3, session="abcdefgh", cached_tokens=128))
    (job,), (seen,) = record.workload.jobs, record.seen
    assert (job.arrival, job.prompt_tokens, job.output_tokens, job.session) == (2.5, 150, 20, "abcdefgh")
    assert (job.params.model, job.params.max_tokens, job.params.ttft, job.params.tpot) == ("sim", 64, 0.3, None)
    assert job.params.headers == {"x-llm-d-slo-ttft-ms": "300"}
    assert (seen.pod, seen.ttft, seen.duration, seen.cached_tokens) == ("pod-0", 0.1, 0.5, 128)


def test_equal_hashes_are_equal_pieces_and_tokens_without_hash_are_unique(tmp_path: Path) -> None:
    longer = request(2.0, chain=["AAAAAAAABBBBBBBBDDDDDDDD"])
    beyond = request(3.0, chain=["AAAAAAAA"], estimated_tokens=1_000)
    record = read(tmp_path, request(), longer, beyond, beyond)
    first, second, third, fourth = record.workload.jobs
    assert first.ids[:2] == second.ids[:2]
    assert first.ids[2] != second.ids[2]
    assert third.ids[0] == first.ids[0]
    assert third.ids[1] != fourth.ids[1]


def test_files_of_one_record_are_ordered(tmp_path: Path) -> None:
    newer = written(tmp_path / "r.jsonl", [head(), request(9.0), request(7.0)])
    older = written(tmp_path / "r.jsonl.1", [head(), request(1.0)])
    record = load([newer, older], Random(0))
    assert [job.arrival for job in record.workload.jobs] == [1.0, 7.0, 9.0]
    assert len(record.seen) == 3


def test_pods_are_known_with_the_size_of_their_caches(tmp_path: Path) -> None:
    size = {"pod": "pod-0", "block_size": 16, "blocks": 1_000}
    record = read(tmp_path, size, {**size, "pod": "gone"}, request(), request(pod="pod-1"))
    assert record.pods == {"pod-0": 16_000, "pod-1": 0}


def test_requests_to_another_pool_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [head(), request(1.0), request(2.0, pool="large"), request(3.0)])
    for pool, arrivals in (("default", [1.0, 3.0]), ("large", [2.0])):
        record = load([path], Random(0), pool)
        assert [job.arrival for job in record.workload.jobs] == arrivals
        assert record.left_out == {"went to another pool": 3 - len(arrivals)}


def test_requests_that_cannot_be_replayed_are_counted_by_reason(tmp_path: Path) -> None:
    refused = {"t": 1.0, "kind": "chat", "status": 404, "outcome": "unknown-model", "duration": 0.001}
    record = read(
        tmp_path,
        request(),
        refused,
        refused,
        request(outcome="upstream-failed", status=502),
        request(output_tokens=None),
        request(chain=[]),
    )
    assert len(record.workload.jobs) == 1
    assert record.left_out == {
        "were refused": 2,
        "failed": 1,
        "had responses of unknown length": 1,
        "had no prompt that is known": 1,
    }


def test_engine_tokens_and_estimates_are_reconciled(tmp_path: Path) -> None:
    """Prompts of three quarters of the estimate: what two of them share is three quarters as long, too."""
    record = read(tmp_path, *[request(at, estimated_tokens=160, prompt_tokens=120) for at in (1.0, 2.0)])
    assert [job.scale for job in record.workload.jobs] == [0.75, 0.75]
    without = read(tmp_path, request(estimated_tokens=160, prompt_tokens=120), request(prompt_tokens=None))
    assert without.workload.jobs[1].prompt_tokens == round(150 * 0.75)


def test_a_trace_has_requests_and_no_observations(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    row = {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}
    path.write_bytes(gzip.compress(orjson.dumps(row)))
    record = load([path], Random(0))
    (job,) = record.workload.jobs
    assert (job.arrival, job.prompt_tokens, job.output_tokens, job.ids) == (0.5, 600, 7, (3, 4))
    assert not record.seen


def test_requests_too_large_for_every_pod_are_left_out_with_their_observations(tmp_path: Path) -> None:
    record = read(tmp_path, request(prompt_tokens=500), request(2.0)).fitting(200)
    assert [job.arrival for job in record.workload.jobs] == [2.0]
    assert len(record.seen) == 1
    assert record.left_out == {"are larger than the KV cache of a pod": 1}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "there is no request in it"),
        ([head()], "no request in it that could be replayed"),
        ([head(kvlane_record=99), request()], "line 1: is of version 99"),
        ([head(block_tokens=16), request()], "line 1: block_tokens is 16, and must be 64"),
        ([request()], "line 1: is neither the head of a record nor a line of a trace"),
        ([head(), request(), request(duration="long")], "line 3: duration is 'long', and must be a number"),
        ([head(), request(duration=None)], "line 2: duration is missing"),
        ([head(), request(chain=["AAA"])], "line 2: chain is no list of hashes"),
        ([head(), request(chain="AAAAAAAA")], "line 2: chain is no list of hashes"),
        ([head(), {"pod": "pod-0", "block_size": 16}], "line 2: blocks is missing"),
        ([{"hash_ids": [1], "input_length": 0, "timestamp": 0}], "line 1: input_length is 0"),
        ([{"hash_ids": [1], "input_length": 5_000, "timestamp": 0}], "line 1: hash_ids are 1, too few for 5000 tokens"),
        ([{"hash_ids": "abc", "input_length": 5, "timestamp": 0}], "line 1: hash_ids is no list of numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_reported_with_its_line(tmp_path: Path, lines: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(BadTrace) as error:
        load([written(tmp_path / "r.jsonl", lines)], Random(0))
    assert reason in str(error.value)
    assert str(tmp_path / "r.jsonl") in str(error.value)


def test_an_unfinished_last_line_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [head(), request()])
    path.write_bytes(path.read_bytes() + b'{"t":')
    record = load([path], Random(0))
    assert (len(record.workload.jobs), record.left_out) == (1, {"was still being written": 1})


@pytest.mark.parametrize(("content", "reason"), [(b'{"t":\n', "is no JSON"), (b"[1]\n", "is no JSON object")])
def test_a_line_that_is_not_an_object_is_reported(tmp_path: Path, content: bytes, reason: str) -> None:
    path = written(tmp_path / "r.jsonl", [head(), request()])
    path.write_bytes(path.read_bytes() + content)
    with pytest.raises(BadTrace, match=f"line 3: {reason}"):
        load([path], Random(0))


@pytest.mark.parametrize("name", ["missing.jsonl", "broken.gz"])
def test_an_unreadable_file_is_reported(tmp_path: Path, name: str) -> None:
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [3]}
    (tmp_path / "broken.gz").write_bytes(gzip.compress(orjson.dumps(row) + b"\n")[:-6])
    with pytest.raises(BadTrace, match="cannot be read"):
        load([tmp_path / name], Random(0))
