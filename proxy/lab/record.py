"""Reader of recorded requests, and of traces in Mooncake's format, as a workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count
from pathlib import Path
from random import Random
from typing import Any

from proxy.core.attempt import Ending
from proxy.core.endpoint import DEFAULT_POOL
from proxy.lab.workload import BadTrace, Job, RequestParams, TruncatedTrace, Workload, load_trace, number_in, rows
from proxy.prefix.hashing import DEPTHS
from proxy.telemetry.recorder import BLOCK_TOKENS, MOST_BLOCKS, NAME_LENGTH, VERSION

COMPUTED = (Ending.COMPLETE.value, Ending.CLIENT_GONE.value, Ending.EVICTED.value)
"""Outcomes of requests that a pod computed, if only in part."""

_ENDS = tuple(depth * BLOCK_TOKENS for depth in DEPTHS[1:] if depth <= MOST_BLOCKS)
"""The number of tokens at the end of each piece of a prompt that has its own hash."""


@dataclass(frozen=True, slots=True)
class ObservedRequest:
    """Recorded result of a request, in seconds; None if unknown. The time to the first token is recorded for streams
    only."""

    pod: str
    ttft: float | None
    duration: float
    cached_tokens: int | None
    is_whole: bool


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """Recorded requests and their results. `seen` has an entry per job, and is empty for a trace; `pods` maps the pods
    that responded to the size of their KV caches in tokens (0: unknown). `left_out` counts requests that cannot be
    replayed, by reason."""

    workload: Workload
    seen: tuple[ObservedRequest, ...] = ()
    pods: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def fitting(self, tokens: int) -> TraceRecord:
        """Return the record without requests that fit on no pod, as `Workload.fitting` does."""
        fits = [job.prompt_tokens + job.output_tokens <= tokens for job in self.workload.jobs]
        if all(fits):
            return self
        left_out = {**self.left_out, "are larger than the KV cache of a pod": len(fits) - sum(fits)}
        seen = tuple(compress(self.seen, fits))
        return replace(self, workload=self.workload.fitting(tokens), seen=seen, left_out=left_out)


def load(paths: Sequence[Path], rng: Random, pool: str = DEFAULT_POOL) -> TraceRecord:
    """Read the files of one record, in any order, or one trace. Keep the requests of this pool. Raise BadTrace."""
    if len(paths) == 1 and not _is_record(paths[0]):
        return TraceRecord(load_trace(paths[0], rng))
    reader = _Reader(pool)
    for path in paths:
        try:
            reader.read(path)
        except TruncatedTrace:
            reader.left_out["was still being written"] += 1
    if not reader.found:
        reasons = "".join(f"; {number} {why}" for why, number in reader.left_out.items())
        raise BadTrace(f"{paths[0]}: there is no request in it that could be replayed{reasons}")
    return reader.record(paths[0].name.split(".")[0])


def _is_record(path: Path) -> bool:
    for _, row in rows(path):
        return "hash_ids" not in row
    raise BadTrace(f"{path}: there is no request in it")


_Line = tuple[Job, Sequence[str], ObservedRequest]
"""A recorded request, the names of the pieces of its prompt, and its result. The job has no pieces yet; its prompt has
0 tokens if the number is unknown."""


@dataclass(slots=True)
class _Reader:
    """The state of one `load`."""

    pool: str
    found: list[_Line] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    pods: dict[str, int] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        is_headed = False
        for number, row in rows(path):
            if "kvlane_record" in row:
                _check_head(path, number, row)
                is_headed = True
            elif not is_headed:
                raise BadTrace(f"{path}, line {number}: is neither the head of a record nor a line of a trace")
            elif "t" not in row:
                size, blocks = (int(number_in(path, number, row, name)) for name in ("block_size", "blocks"))
                self.pods[str(row.get("pod"))] = size * blocks
            elif why := _unfit(row, self.pool):
                self.left_out[why] += 1
            else:
                self.found.append(_line(path, number, row))

    def record(self, name: str) -> TraceRecord:
        lines = sorted(self.found, key=lambda line: line[0].arrival)
        counted = [job for job, _, _ in lines if job.prompt_tokens and job.text_tokens]
        estimated = sum(job.text_tokens for job in counted)
        scale = sum(job.prompt_tokens for job in counted) / estimated if estimated else 1.0
        ids: dict[str, int] = {}
        unnamed = count(-1, -1)
        jobs = tuple(_named(job, names, scale, ids, unnamed) for job, names, _ in lines)
        pods = dict.fromkeys(sorted({seen.pod for _, _, seen in lines}), 0)
        known = {pod: tokens for pod, tokens in self.pods.items() if pod in pods}
        return TraceRecord(Workload(name, jobs), tuple(seen for _, _, seen in lines), pods | known, dict(self.left_out))


def _check_head(path: Path, number: int, row: Mapping[str, Any]) -> None:
    if row["kvlane_record"] != VERSION:
        raise BadTrace(f"{path}, line {number}: is of version {row['kvlane_record']}, and this kvlane reads {VERSION}")
    if row.get("block_tokens") != BLOCK_TOKENS:
        raise BadTrace(f"{path}, line {number}: block_tokens is {row.get('block_tokens')}, and must be {BLOCK_TOKENS}")


def _unfit(row: Mapping[str, Any], pool: str) -> str:
    """Return the reason why a request cannot be replayed; empty if it can."""
    if "chain" not in row:
        return "were refused"
    if row.get("pool", DEFAULT_POOL) != pool:
        return "went to another pool"
    if row.get("outcome") not in COMPUTED or row.get("status", 0) >= 300:
        return "failed"
    if row["chain"] in ([], [""]):
        return "had no prompt that is known"
    if "output_tokens" not in row:
        return "had responses of unknown length"
    return ""


def _line(path: Path, number: int, row: Mapping[str, Any]) -> _Line:
    def whole(name: str) -> int | None:
        return int(number_in(path, number, row, name)) if name in row else None

    def seconds(name: str) -> float | None:
        return number_in(path, number, row, name) if name in row else None

    streamed, cached = row.get("stream") is True, whole("cached_tokens")
    ttft, tpot = seconds("slo_ttft"), seconds("slo_tpot")
    model, most = str(row.get("model", "")), whole("max_tokens") or 0
    job = Job(
        arrival=number_in(path, number, row, "t", least=-1e12),
        prompt_tokens=whole("prompt_tokens") or 0,
        output_tokens=max(1, whole("output_tokens") or 0),
        ids=(),
        session=str(row.get("session", "")),
        text_tokens=max(1, int(number_in(path, number, row, "estimated_tokens"))),
        params=RequestParams(model, streamed, most, _headers(ttft, tpot), ttft, tpot),
    )
    seen = ObservedRequest(
        pod=str(row.get("pod", "")),
        ttft=seconds("ttft") if streamed else None,
        duration=number_in(path, number, row, "duration"),
        cached_tokens=whole("expected_cached_tokens") if cached is None else cached,
        is_whole=row["outcome"] == Ending.COMPLETE.value,
    )
    return job, tuple(_names(path, number, row["chain"])), seen


def _names(path: Path, number: int, chains: Any) -> Iterator[str]:
    parts = chains if isinstance(chains, list) else [None]
    for part in parts:
        if not isinstance(part, str) or len(part) % NAME_LENGTH:
            raise BadTrace(f"{path}, line {number}: chain is no list of hashes, {NAME_LENGTH} characters to each")
        for at in range(0, len(part), NAME_LENGTH):
            yield part[at : at + NAME_LENGTH]


def _headers(ttft: float | None, tpot: float | None) -> dict[str, str]:
    objectives = {"x-llm-d-slo-ttft-ms": ttft, "x-llm-d-slo-tpot-ms": tpot}
    return {name: f"{value * 1000:g}" for name, value in objectives.items() if value is not None}


def _named(job: Job, names: Sequence[str], scale: float, ids: dict[str, int], unnamed: Iterator[int]) -> Job:
    """Return the job with its pieces; the part of the prompt beyond the last hash is shared with no other prompt."""
    pieces = tuple(ids.setdefault(name, len(ids)) for name in names[: len(_ENDS)])
    ends: tuple[int, ...] = _ENDS
    if job.text_tokens > _ENDS[len(pieces) - 1]:
        ends = (*_ENDS[: len(pieces)], job.text_tokens)
        pieces = (*pieces, next(unnamed))
    prompt = job.prompt_tokens or max(1, round(job.text_tokens * scale))
    return replace(job, prompt_tokens=prompt, ids=pieces, nodes=pieces, ends=ends, scale=scale)
