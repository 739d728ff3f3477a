"""Requests to replay: the arrival time of each, the identity of every piece of its prompt, and the text that routers
read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import orjson
from xxhash import xxh3_128_hexdigest

from proxy.core.errors import KvlaneError, cause
from proxy.core.request import BYTES_PER_TOKEN
from proxy.lab.cache import Parts

CHUNK = 512
"""Tokens of a prompt per id in a trace in Mooncake's format."""

BUCKET = 3.0
"""Seconds. Production traces round arrivals to this step; arrivals at one moment are spread over it."""


class BadTrace(KvlaneError):
    """A file that is neither a record nor a trace; the message contains line and reason."""


class TruncatedTrace(BadTrace):
    """The last line is incomplete: the file may still be written to."""


@dataclass(frozen=True, slots=True)
class RequestParams:
    """The fields that a client sends in addition to its prompt. `max_tokens` 0: no limit; None: the length of the
    response."""

    model: str = ""
    stream: bool = True
    max_tokens: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    ttft: float | None = None
    """Its objective for the time to the first token, in seconds; None: the general objective."""
    tpot: float | None = None


DEFAULT_PARAMS = RequestParams()


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `ids` name the pieces of the prompt: equal ids mean equal text, and the last piece is cut at the
    prompt's end. `nodes` name the same pieces together with all text before them. If a later prompt continues the
    response, `continued` are the ids of prompt and response together. `session` is the clients' name of the
    conversation. `ends` are the numbers of tokens at the end of each piece, with four bytes of text per token; without
    `ends`, a piece has 512 tokens. The text has `text_tokens` such tokens (0: as many as the prompt); each is `scale`
    tokens of the engine."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    continued: tuple[int, ...] = ()
    continued_nodes: tuple[int, ...] = ()
    session: str = ""
    ends: tuple[int, ...] = ()
    text_tokens: int = 0
    scale: float = 1.0
    params: RequestParams = DEFAULT_PARAMS

    def ends_of(self, pieces: int) -> Sequence[int]:
        """Return the ends of the first pieces, in tokens of text."""
        return self.ends[:pieces] if self.ends else range(CHUNK, (pieces + 1) * CHUNK, CHUNK)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    jobs: tuple[Job, ...]

    @property
    def rate(self) -> float:
        first, last = self.jobs[0].arrival, self.jobs[-1].arrival
        return len(self.jobs) / (last - first) if last > first else float(len(self.jobs))

    def at_rate(self, rate: float) -> Workload:
        """Return the workload with scaled arrival times, starting at 0."""
        factor, first = self.rate / rate, self.jobs[0].arrival
        return replace(self, jobs=tuple(replace(job, arrival=(job.arrival - first) * factor) for job in self.jobs))

    def fitting(self, tokens: int) -> Workload:
        """Return the workload without requests whose prompt and response together exceed this number of tokens."""
        return replace(self, jobs=tuple(job for job in self.jobs if job.prompt_tokens + job.output_tokens <= tokens))

    def window(self, first: int, count: int) -> Workload:
        """Return `count` consecutive requests, so that shared prefixes stay shared."""
        return replace(self, jobs=self.jobs[first : first + count])


def load_trace(path: Path, rng: Random) -> Workload:
    """Read a trace in Mooncake's format: a JSON object per line, optionally gzipped. Arrivals at one moment are spread
    over the time to the next bucket. Raise BadTrace."""
    jobs = [_traced(path, number, row) for number, row in rows(path)]
    if not jobs:
        raise BadTrace(f"{path}: there is no request in it")
    return Workload(path.name.split(".")[0], named(_spread(jobs, rng)))


def rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each non-empty line and its object. Raise BadTrace."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        place = f"{path}, after line {number}" if number else f"{path}"
        raise BadTrace(f"{place}: cannot be read: {cause(error)}") from None


def number_in(path: Path, line: int, row: Mapping[str, Any], name: str, least: float = 0) -> float:
    """Return a number of a row. Raise BadTrace if it is missing or too small."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
        found = "is missing" if value is None else f"is {value!r}"
        raise BadTrace(f"{path}, line {line}: {name} {found}, and must be a number of at least {least:g}")
    return value


def named(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Return the jobs in order of arrival, with their nodes."""
    known: dict[tuple[int, int], int] = {}

    def nodes(ids: Sequence[int]) -> tuple[int, ...]:
        node, found = -1, []
        for chunk in ids:
            node = known.setdefault((node, chunk), len(known))
            found.append(node)
        return tuple(found)

    return tuple(
        replace(job, nodes=nodes(job.ids), continued_nodes=nodes(job.continued))
        for job in sorted(jobs, key=lambda job: job.arrival)
    )


def _object(path: Path, number: int, line: bytes) -> Any:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        fault = BadTrace if line.endswith(b"\n") else TruncatedTrace
        raise fault(f"{path}, line {number}: is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadTrace(f"{path}, line {number}: is no JSON object")
    return row


def _traced(path: Path, line: int, row: Mapping[str, Any]) -> Job:
    prompt = int(number_in(path, line, row, "input_length", 1))
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise BadTrace(f"{path}, line {line}: hash_ids is no list of numbers")
    if len(ids) * CHUNK < prompt:
        raise BadTrace(f"{path}, line {line}: hash_ids are {len(ids)}, too few for {prompt} tokens, 512 to each")
    arrival = number_in(path, line, row, "timestamp") / 1000
    return Job(arrival, prompt, max(1, int(number_in(path, line, row, "output_length"))), tuple(ids))


def _spread(jobs: Sequence[Job], rng: Random) -> list[Job]:
    """Spread arrivals over their bucket if several requests arrive at once. A trace with exact times keeps them."""
    moments = {job.arrival for job in jobs}
    if len(moments) > len(jobs) / 2:
        return list(jobs)
    return [replace(job, arrival=job.arrival + BUCKET * rng.random()) for job in jobs]


def prompt_text(job: Job) -> bytes:
    """Return the text of the prompt, four characters per token; the same id is the same text in all prompts."""
    ends = (0, *job.ends_of(len(job.ids)))
    text = bytearray()
    for identity, (start, end) in zip(job.ids, pairwise(ends), strict=True):
        size = (end - start) * BYTES_PER_TOKEN
        digest = xxh3_128_hexdigest(identity.to_bytes(8, "little", signed=True)).encode()
        text += (digest * -(-size // len(digest)))[:size]
    return bytes(text[: (job.text_tokens or job.prompt_tokens) * BYTES_PER_TOKEN])


def request_body(job: Job, model: str) -> bytes:
    """Return the body of a completion, because a chat template would shift the text relative to the engine's blocks."""
    params = job.params
    limit = job.output_tokens if params.max_tokens is None else params.max_tokens
    return b'{"model":%b,"stream":%b,%b"ignore_eos":true,%b"prompt":"%b"}' % (
        orjson.dumps(model),
        b"true" if params.stream else b"false",
        b'"max_tokens":%d,' % limit if limit else b"",
        b'"stream_options":{"include_usage":true},' if params.stream else b"",
        prompt_text(job),
    )


def prompt_blocks(job: Job, block_size: int) -> Parts:
    return _blocks(job, job.nodes, job.prompt_tokens // block_size, block_size)


def blocks_with_response(job: Job, block_size: int) -> Parts:
    """Return the blocks that later prompts can reuse; empty if no prompt continues the response. The last token is
    generated and never computed."""
    whole = (job.prompt_tokens + job.output_tokens - 1) // block_size
    return _blocks(job, job.continued_nodes, whole, block_size) if job.continued_nodes else ()


def _blocks(job: Job, nodes: Sequence[int], whole: int, block_size: int) -> Parts:
    """Return the blocks of each piece. The end of a piece does not depend on the prompt, except for the last piece,
    which has all remaining blocks."""
    found, start = [], 0
    for at, (node, end) in enumerate(zip(nodes, job.ends_of(len(nodes)), strict=True), 1):
        blocks = whole if at == len(nodes) else min(int(end * job.scale) // block_size, whole)
        if blocks > start:
            found.append((node, blocks - start))
            start = blocks
    return tuple(found)
