"""What a pod responds, as values: a metrics exposition as Metrics, a model list as its cards. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import orjson

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.fleet.dialects import Dialect, Specs
from proxy.telemetry.exposition import Sample, SampleReader, Samples, ScrapeError

PROCESS_START = "process_start_time_seconds"

Card = Mapping[str, Any]
"""One entry of /v1/models. kvlane reads `id`; `parent`, which marks a LoRA adapter; and `root`, which is equal for
several names of one model. The other fields pass to clients."""

_COUNT_LIMIT = 2.0**53
"""Upper limit of counts and sums, so that JSON for other processes can represent them."""

MODELS_BYTES = 1024 * 1024
"""Largest model list. Its cards are sent to all workers."""

MODELS_OPENINGS = 10_000
"""Largest number of lists and objects in a model list, which is parsed in one step of the event loop, 20 ms at most. A
card of vLLM has three."""

MODELS_DEPTH = 32
"""Largest nesting of a model list: JSON parsers accept deeper nesting than serialisers."""

MOST_SAMPLES = 1000
"""Largest number of samples of one family: three for each of 300 data-parallel ranks."""


class Fetcher(Protocol):
    """The HTTP client of a refresh loop."""

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """Status and body, as they are: nothing is followed or unpacked. Raises ConnectRefused if the pod refuses
        connections, another UpstreamFailed if no whole response came, or none in time."""


def parse(text: bytes, dialect: Dialect, scraped_at: float = 0.0) -> Metrics:
    """Raise ScrapeError if the text has no metric of the dialect. The series of data-parallel ranks are added up,
    shares are averaged. Only lines of the dialect are parsed."""
    return _metrics_of(_reader(dialect).read(text), dialect, scraped_at)


def parse_ranks(text: bytes, dialect: Dialect) -> Scrape:
    """As `parse`, for data-parallel ranks too."""
    return _scrape_of(_reader(dialect).read(text), dialect, 0.0)


@dataclass(frozen=True, slots=True)
class Scrape:
    """A scrape of a pod: the metrics of the whole pod, and of its data-parallel ranks, where it has several."""

    total: Metrics
    ranks: Sequence[Metrics] = ()

    def of(self, endpoints: Sequence[Endpoint]) -> Sequence[Metrics]:
        """Return the metrics of each of the pod's endpoints. If the exposition does not distinguish ranks, each has an
        equal part of the counts."""
        if len(endpoints) == 1:
            return (self.total,)
        if len(endpoints) == len(self.ranks):
            return self.ranks
        return [_part(self.total, len(endpoints), rank) for rank in range(len(endpoints))]


async def parse_in_steps(text: bytes, dialect: Dialect, scraped_at: float = 0.0) -> Scrape:
    """As `parse_ranks`, with the event loop running after every STEP bytes."""
    return _scrape_of(await _reader(dialect).read_in_steps(text), dialect, scraped_at)


def _scrape_of(samples: Samples, dialect: Dialect, scraped_at: float) -> Scrape:
    total = _metrics_of(samples, dialect, scraped_at)
    ranks = _ranks(samples, dialect)
    return Scrape(total, [_read(each, dialect, scraped_at) for each in _by_rank(samples, dialect.rank_label, ranks)])


def _ranks(samples: Samples, dialect: Dialect) -> Sequence[str]:
    """Return the values of the rank label in the order of the ranks; empty for a pod without ranks. In vLLM's hybrid
    balancing they do not start at 0, and requests name a rank by its position."""
    running = _samples_of(dialect.running, samples)
    if len(running) < 2 or not dialect.rank_label:
        return ()
    named = {sample.labels.get(dialect.rank_label, "") for sample in running}
    numbers = sorted(int(name) for name in named if name.isdecimal() and len(name) < 5)
    if not numbers or (len(numbers) < 2 and dialect.lists_all_ranks):
        return ()
    if dialect.lists_all_ranks:
        return [str(number) for number in numbers]
    return [str(number) for number in range(numbers[-1] + 1)]


def _by_rank(samples: Samples, label: str, ranks: Sequence[str]) -> Sequence[Samples]:
    """Return the samples of each rank, and with each of them the samples that name no rank."""
    found: dict[str, dict[str, list[Sample]]] = {rank: {} for rank in ranks}
    for name, family in samples.items():
        of_family: dict[str, list[Sample]] = {}
        for rank, of_rank in found.items():
            of_family[rank] = of_rank[name] = []
        for sample in family:
            named = sample.labels.get(label)
            if named is None:
                for series in of_family.values():
                    series.append(sample)
            elif named in of_family:
                of_family[named].append(sample)
    return list(found.values())


def _part(total: Metrics, number: int, rank: int) -> Metrics:
    return replace(
        total,
        waiting=total.waiting // number + (rank < total.waiting % number),
        running=total.running // number + (rank < total.running % number),
        blocks=total.blocks // number,
        prefix_queries=total.prefix_queries / number,
        prefix_hits=total.prefix_hits / number,
        prompt_tokens=-1.0,  # of one rank it is not known, and RankCheck must not compare with a guess
        generation_tokens=total.generation_tokens / number if total.generation_tokens >= 0 else -1.0,
        attributes=dict(total.attributes),
    )


def _metrics_of(samples: Samples, dialect: Dialect, scraped_at: float) -> Metrics:
    if not samples.keys() - {PROCESS_START}:
        raise ScrapeError(
            "it has no metric of the pod's engine; see the `engine` of the pod, and path and port of `pods.refresh`"
        )
    return _read(samples, dialect, scraped_at)


def _read(samples: Samples, dialect: Dialect, scraped_at: float) -> Metrics:
    block_size, blocks = _blocks(dialect, samples)
    active, waiting, max_active = _adapters(_samples_of(dialect.lora, samples))
    return Metrics(
        waiting=_count(_total(dialect.waiting, samples)),
        running=_count(_total(dialect.running, samples)),
        kv_usage=_share(_samples_of(dialect.kv_usage, samples)),
        active_models=active,
        waiting_models=waiting,
        max_active_models=max_active,
        block_size=block_size,
        blocks=blocks,
        prefix_queries=_total(dialect.prefix_queries, samples),
        prefix_hits=_total(dialect.prefix_hits, samples),
        process_started=max((sample.value for sample in samples.get(PROCESS_START, ())), default=0.0),
        prompt_tokens=_total_or_unknown(dialect.prompt_tokens, samples),
        generation_tokens=_total_or_unknown(dialect.generation_tokens, samples),
        sleep_level=_sleep_level(dialect, samples),
        attributes=_attributes(dialect, samples),
        scraped_at=scraped_at,
        freshness=Freshness.FRESH,
    )


def parse_models(body: bytes) -> tuple[Card, ...]:
    """Return the cards of a /v1/models response. Raise ScrapeError for anything else, and for a list that is too large
    or too deeply nested."""
    if len(body) > MODELS_BYTES:
        raise ScrapeError(f"the list of models is larger than {MODELS_BYTES} bytes")
    if body.count(b"{") + body.count(b"[") > MODELS_OPENINGS:
        raise ScrapeError(f"the list of models has more than {MODELS_OPENINGS} lists and objects")
    try:
        cards = orjson.loads(body)["data"]
        ids = [card["id"] for card in cards]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        raise ScrapeError("the response is not a list of models") from None
    if not all(isinstance(model, str) for model in ids):
        raise ScrapeError("the response lists a model whose id is not text")
    if _is_deeper(cards, MODELS_DEPTH):
        raise ScrapeError(f"the list of models is nested more than {MODELS_DEPTH} deep")
    return tuple(cards)


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects in `value` are nested more than `levels` deep."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in value if isinstance(each, dict | list))


@cache
def _reader(dialect: Dialect) -> SampleReader:
    keep_largest = [spec.name for spec in dialect.lora]
    return SampleReader(dialect.names | {PROCESS_START}, keep_largest, MOST_SAMPLES)


def _samples_of(alternatives: Specs, samples: Samples) -> Sequence[Sample]:
    """Return the samples of the first alternative that has any."""
    for spec in alternatives:
        if found := spec.select(samples):
            return found
    return ()


def _total(alternatives: Specs, samples: Samples) -> float:
    return min(max(0.0, sum(sample.value for sample in _samples_of(alternatives, samples))), _COUNT_LIMIT)


def _total_or_unknown(alternatives: Specs, samples: Samples) -> float:
    """Return the total, or -1 if the exposition has none of these series."""
    return _total(alternatives, samples) if _samples_of(alternatives, samples) else -1.0


def _sleep_level(dialect: Dialect, samples: Samples) -> int:
    if all(sample.value for sample in _samples_of(dialect.awake, samples)):
        return 0
    return 2 if any(sample.value for sample in _samples_of(dialect.discarded, samples)) else 1


def _share(found: Sequence[Sample]) -> float:
    return sum(min(max(sample.value, 0.0), 1.0) for sample in found) / len(found) if found else 0.0


def _count(value: float) -> int:
    return int(min(value, _COUNT_LIMIT))


def _blocks(dialect: Dialect, samples: Samples) -> tuple[int, int]:
    """Return the tokens per KV block, and the blocks of all ranks together."""
    labels = [sample.labels for sample in _samples_of(dialect.cache_info, samples)]
    if labels:
        sizes = [_number(label.get(dialect.block_size_label)) for label in labels]
        return max(sizes), _count(sum(_number(label.get(dialect.blocks_label)) for label in labels))
    size = max((sample.value for sample in _samples_of(dialect.block_size, samples)), default=0.0)
    return _count(max(0.0, size)), _count(_total(dialect.blocks, samples))


def _number(text: str | None) -> int:
    """Engines write `None` before the value is known."""
    return int(text) if text and len(text) < 16 and text.isdecimal() else 0


def _adapters(found: Sequence[Sample]) -> tuple[frozenset[str], frozenset[str], int]:
    """Return the current adapters. Past label sets stay in the exposition; the value is the time each was last true."""
    if not found:
        return frozenset(), frozenset(), 0
    labels = max(found, key=lambda sample: sample.value).labels
    return (
        _names(labels.get("running_lora_adapters", "")),
        _names(labels.get("waiting_lora_adapters", "")),
        _number(labels.get("max_lora")),
    )


def _names(listed: str) -> frozenset[str]:
    return frozenset(name for each in listed.split(",") if (name := each.strip()))


def _attributes(dialect: Dialect, samples: Samples) -> dict[str, float]:
    """Of several series use the newest, or the first without timestamps."""
    found = ((key, spec.select(samples)) for key, spec in dialect.attributes)
    return {key: max(series, key=lambda sample: sample.timestamp).value for key, series in found if series}
