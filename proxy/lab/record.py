"""Reads what was recorded, and traces in Mooncake's format, as a workload."""

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
from proxy.lab.workload import BadTrace, CutShort, Job, RequestParams, Workload, load_trace, number_in, rows
from proxy.prefix.hashing import DEPTHS
from proxy.telemetry.recorder import BLOCK_TOKENS, MOST_BLOCKS, NAME_LENGTH, VERSION

COMPUTED = (Ending.COMPLETE.value, Ending.CLIENT_GONE.value, Ending.EVICTED.value)
"""Outcomes of requests that a pod worked on; of those that were broken off, for as long as they lasted."""

_ENDS = tuple(depth * BLOCK_TOKENS for depth in DEPTHS[1:] if depth <= MOST_BLOCKS)
"""The tokens after which each piece of a prompt ends that has a hash of its own."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a request in its time. Seconds; None: not known. Of a whole answer, that is no stream, the time to
    the first token is not known."""

    pod: str
    ttft: float | None
    duration: float
    cached_tokens: int | None
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Record:
    """`seen` has an entry per job, or none at all for a trace; `pods` are those that answered, with the tokens that
    their KV caches hold (0: not known). `left_out` says why how many requests cannot be replayed."""

    workload: Workload
    seen: tuple[Seen, ...] = ()
    pods: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def fitting(self, tokens: int) -> Record:
        """Without requests that no pod could ever take, as `Workload.fitting`."""
        fits = [job.prompt_tokens + job.output_tokens <= tokens for job in self.workload.jobs]
        if all(fits):
            return self
        left_out = {**self.left_out, "are larger than the KV cache of a pod": len(fits) - sum(fits)}
        seen = tuple(compress(self.seen, fits))
        return replace(self, workload=self.workload.fitting(tokens), seen=seen, left_out=left_out)


def load(paths: Sequence[Path], rng: Random, pool: str = DEFAULT_POOL) -> Record:
    """Several files of one record count as one, in any order. Of a record, what went to this pool. Raises BadTrace."""
    if len(paths) == 1 and not _is_record(paths[0]):
        return Record(load_trace(paths[0], rng))
    reader = _Reader(pool)
    for path in paths:
        reader.read(path)
    if not reader.found:
        raise BadTrace(f"{paths[0]}: there is no request in it that could be replayed{_reasons(reader.left_out)}")
    return reader.record(paths[0].name.split(".")[0])


def _is_record(path: Path) -> bool:
    for _, row in rows(path):
        return "hash_ids" not in row
    raise BadTrace(f"{path}: there is no request in it")


def _reasons(left_out: Mapping[str, int]) -> str:
    return "".join(f"; {number} {why}" for why, number in left_out.items())


@dataclass(frozen=True, slots=True)
class _Line:
    """A request as it was written down."""

    at: float
    estimated: int
    prompt: int | None
    output: int
    names: tuple[str, ...]
    params: RequestParams
    session: str
    seen: Seen


class _Reader:
    """Lives as long as one `load`."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self.found: list[_Line] = []
        self.left_out: Counter[str] = Counter()
        self._pods: dict[str, int] = {}

    def read(self, path: Path) -> None:
        try:
            self._read(path)
        except CutShort:
            self.left_out["was still being written"] += 1

    def _read(self, path: Path) -> None:
        is_headed = False
        for number, row in rows(path):
            if "kvlane_record" in row:
                _check_head(path, number, row)
                is_headed = True
            elif not is_headed:
                raise BadTrace(f"{path}, line {number}: is neither the head of a record nor a line of a trace")
            elif "t" not in row:
                size, blocks = (int(number_in(path, number, row, name)) for name in ("block_size", "blocks"))
                self._pods[str(row.get("pod"))] = size * blocks
            elif why := _unfit(row, self._pool):
                self.left_out[why] += 1
            else:
                self.found.append(_line(path, number, row))

    def record(self, name: str) -> Record:
        lines = sorted(self.found, key=lambda line: line.at)
        counted = [line for line in lines if line.prompt is not None and line.estimated]
        estimated = sum(line.estimated for line in counted)
        scale = sum(line.prompt or 0 for line in counted) / estimated if estimated else 1.0
        ids: dict[str, int] = {}
        unnamed = count(-1, -1)
        jobs = tuple(_job(line, scale, ids, unnamed) for line in lines)
        pods = dict.fromkeys(sorted({line.seen.pod for line in lines}), 0)
        known = {pod: tokens for pod, tokens in self._pods.items() if pod in pods}
        return Record(Workload(name, jobs), tuple(line.seen for line in lines), pods | known, dict(self.left_out))


def _check_head(path: Path, number: int, row: Mapping[str, Any]) -> None:
    if row["kvlane_record"] != VERSION:
        raise BadTrace(f"{path}, line {number}: is of version {row['kvlane_record']}, and this kvlane reads {VERSION}")
    if row.get("block_tokens") != BLOCK_TOKENS:
        raise BadTrace(f"{path}, line {number}: block_tokens is {row.get('block_tokens')}, and must be {BLOCK_TOKENS}")


def _unfit(row: Mapping[str, Any], pool: str) -> str:
    """Why a request cannot be replayed; empty if it can."""
    if "chain" not in row:
        return "were refused"
    if row.get("pool", DEFAULT_POOL) != pool:
        return "went to another pool"
    if row.get("outcome") not in COMPUTED or row.get("status", 0) >= 300:
        return "failed"
    if row["chain"] in ([], [""]):
        return "had no prompt that is known"
    if "output_tokens" not in row:
        return "had answers of unknown length"
    return ""


def _line(path: Path, number: int, row: Mapping[str, Any]) -> _Line:
    def whole(name: str) -> int | None:
        return int(number_in(path, number, row, name)) if name in row else None

    def seconds(name: str) -> float | None:
        return number_in(path, number, row, name) if name in row else None

    streamed = row.get("stream") is True
    params = RequestParams(
        model=str(row.get("model", "")),
        stream=streamed,
        max_tokens=whole("max_tokens") or 0,
        headers=_headers(seconds("slo_ttft"), seconds("slo_tpot")),
        ttft=seconds("slo_ttft"),
        tpot=seconds("slo_tpot"),
    )
    cached = whole("cached_tokens")
    seen = Seen(
        pod=str(row.get("pod", "")),
        ttft=seconds("ttft") if streamed else None,
        duration=number_in(path, number, row, "duration"),
        cached_tokens=whole("expected_cached_tokens") if cached is None else cached,
        is_whole=row["outcome"] == Ending.COMPLETE.value,
    )
    return _Line(
        at=number_in(path, number, row, "t", least=-1e12),
        estimated=max(1, int(number_in(path, number, row, "estimated_tokens"))),
        prompt=whole("prompt_tokens") or None,
        output=max(1, whole("output_tokens") or 0),
        names=tuple(_names(path, number, row["chain"])),
        params=params,
        session=str(row.get("session", "")),
        seen=seen,
    )


def _names(path: Path, number: int, chains: Any) -> Iterator[str]:
    parts = chains if isinstance(chains, list) else [None]
    for part in parts:
        if not isinstance(part, str) or len(part) % NAME_LENGTH:
            raise BadTrace(f"{path}, line {number}: chain is no list of hashes, {NAME_LENGTH} characters to each")
        for at in range(0, len(part), NAME_LENGTH):
            yield part[at : at + NAME_LENGTH]


def _headers(ttft: float | None, tpot: float | None) -> dict[str, str]:
    headers = {
        "x-llm-d-slo-ttft-ms": None if ttft is None else f"{ttft * 1000:g}",
        "x-llm-d-slo-tpot-ms": None if tpot is None else f"{tpot * 1000:g}",
    }
    return {name: value for name, value in headers.items() if value}


def _job(line: _Line, scale: float, ids: dict[str, int], unnamed: Iterator[int]) -> Job:
    """What lies beyond the last hash is shared with nobody."""
    names = line.names[: len(_ENDS)]
    pieces = tuple(ids.setdefault(name, len(ids)) for name in names)
    ends: tuple[int, ...] = _ENDS
    if line.estimated > _ENDS[len(pieces) - 1]:
        ends = (*_ENDS[: len(pieces)], line.estimated)
        pieces = (*pieces, next(unnamed))
    prompt = line.prompt or max(1, round(line.estimated * scale))
    return Job(
        arrival=line.at,
        prompt_tokens=prompt,
        output_tokens=line.output,
        ids=pieces,
        nodes=pieces,
        session=line.session,
        ends=ends,
        text_tokens=line.estimated,
        scale=scale,
        params=line.params,
    )
