"""What a pod answers, as values: a metrics exposition as Metrics, a model list as its cards. No I/O."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any, Protocol

import orjson

from proxy.core.endpoint import Freshness, Metrics
from proxy.core.errors import KvlaneError
from proxy.fleet.dialects import Dialect, Specs
from proxy.fleet.series import Sample, Samples

PROCESS_START = "process_start_time_seconds"

Card = Mapping[str, Any]
"""One entry of /v1/models; it has an `id`, everything else is the engine's."""

_COUNT_LIMIT = 2.0**53
"""No count or sum is larger, so that JSON for other processes can hold it."""

MODELS_BYTES = 1024 * 1024
"""Size of a model list that is read. Its cards are sent to all workers."""

MODELS_DEPTH = 32
"""Nesting of a model list that is read. JSON can be read deeper than it can be written for other processes."""

STEP = 128 << 10
"""Bytes of an exposition that are read in one step of the event loop, 3 ms at worst. A typical exposition has 70 KB."""

MOST_SAMPLES = 1000
"""Samples of one family: three for each of 300 data-parallel ranks."""


class Fetcher(Protocol):
    """How a loop asks."""

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """Status and body, as they are: nothing is followed or unpacked. Raises ConnectRefused if nobody listens there,
        another UpstreamFailed if no whole answer came, or none in time."""


class ScrapeError(KvlaneError):
    """The answer is not what was asked for."""


def parse(text: bytes, dialect: Dialect, scraped_at: float = 0.0) -> Metrics:
    """Raises ScrapeError if nothing of the dialect is in the text.

    The series of data-parallel ranks are added up, shares are averaged. Only lines of the dialect are looked at.
    """
    return _metrics_of(samples_of(text, dialect), dialect, scraped_at)


async def parse_in_steps(text: bytes, dialect: Dialect, scraped_at: float = 0.0) -> Metrics:
    """Do the same as `parse`, and let the event loop run after every STEP bytes."""
    return _metrics_of(await samples_in_steps(text, dialect), dialect, scraped_at)


def _metrics_of(samples: Samples, dialect: Dialect, scraped_at: float) -> Metrics:
    if not samples.keys() - {PROCESS_START}:
        raise ScrapeError("the exposition has none of the engine's metrics")
    block_size, blocks = _blocks(dialect, samples)
    active, waiting, max_active = _adapters(_first(dialect.lora, samples))
    return Metrics(
        waiting=_count(_total(dialect.waiting, samples)),
        running=_count(_total(dialect.running, samples)),
        kv_usage=_share(_first(dialect.kv_usage, samples)),
        active_models=active,
        waiting_models=waiting,
        max_active_models=max_active,
        block_size=block_size,
        blocks=blocks,
        prefix_queries=_total(dialect.prefix_queries, samples),
        prefix_hits=_total(dialect.prefix_hits, samples),
        process_started=max((sample.value for sample in samples.get(PROCESS_START, ())), default=0.0),
        prompt_tokens=_known(dialect.prompt_tokens, samples),
        generation_tokens=_known(dialect.generation_tokens, samples),
        sleep_level=_sleep_level(dialect, samples),
        attributes=_attributes(dialect, samples),
        scraped_at=scraped_at,
        freshness=Freshness.FRESH,
    )


def parse_models(body: bytes) -> tuple[Card, ...]:
    """Return the cards of a /v1/models response. Raises ScrapeError for anything else, and for a list that is too large
    or nested too deeply."""
    if len(body) > MODELS_BYTES:
        raise ScrapeError(f"the list of models is larger than {MODELS_BYTES} bytes")
    try:
        cards = orjson.loads(body)["data"]
        ids = [card["id"] for card in cards]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        raise ScrapeError("the answer is not a list of models") from None
    if not all(isinstance(model, str) for model in ids):
        raise ScrapeError("the answer lists a model whose id is not text")
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


def samples_of(text: bytes, dialect: Dialect) -> dict[str, list[Sample]]:
    """Return the samples by the names of their families. Families that the dialect does not name are skipped. Raises
    ScrapeError if a family has more than MOST_SAMPLES samples or a line is longer than STEP."""
    samples: dict[str, list[Sample]] = {}
    for _ in _read(text, dialect, samples):
        pass
    return samples


async def samples_in_steps(text: bytes, dialect: Dialect) -> dict[str, list[Sample]]:
    """Do the same as `samples_of`, and let the event loop run after every STEP bytes."""
    samples: dict[str, list[Sample]] = {}
    for _ in _read(text, dialect, samples):
        await asyncio.sleep(0)
    return samples


def _read(text: bytes, dialect: Dialect, samples: dict[str, list[Sample]]) -> Iterator[None]:
    """Fill `samples`, and yield between two steps."""
    text = b"\n" + text
    lines, start = _lines(dialect), 0
    while True:
        end = len(text) if len(text) - start <= STEP else text.rfind(b"\n", start + 1, start + STEP)
        if end < 0:
            raise ScrapeError(f"the exposition has a line of more than {STEP} bytes")
        for name, line in lines.findall(text, start, end):
            if (sample := _sample(line)) is not None:
                samples.setdefault(name.decode(), []).append(sample)
        _bound(dialect, samples)
        if end == len(text):
            return
        start = end
        yield


def _bound(dialect: Dialect, samples: dict[str, list[Sample]]) -> None:
    """Raise ScrapeError for a family of more than MOST_SAMPLES samples. The family of adapters grows with each
    combination of adapters that was ever in use, so only its newest sample is kept, which is the one that is read."""
    for name, family in samples.items():
        if len(family) <= MOST_SAMPLES:
            continue
        if not any(spec.name == name for spec in dialect.lora):
            raise ScrapeError(f"the exposition has more than {MOST_SAMPLES} series of {name}")
        family[:] = [max(family, key=lambda sample: sample.value)]


@cache
def _lines(dialect: Dialect) -> re.Pattern[bytes]:
    """One search through the text for all families costs a third of one `find` each; it is that cheap because common
    beginnings are shared, so that a line is given up at its first byte that differs."""
    names = _alternatives(sorted(dialect.names | {PROCESS_START}))
    return re.compile(rf"\n({names})(?=[{{ \t])([^\n]*)".encode())


def _alternatives(words: Collection[str]) -> str:
    """A pattern that matches exactly these words, as a tree of their common beginnings."""
    branches = []
    for first, group in groupby(sorted(word for word in words if word), key=lambda word: word[0]):
        tails = [word[1:] for word in group]
        branches.append(re.escape(first) + _alternatives(tails))
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{pattern})?" if pattern and "" in words else pattern


def _sample(line: bytes) -> Sample | None:
    """`{labels} value timestamp`, of which the value alone is not optional; an exemplar behind it is cut off."""
    if b" # {" in line:
        line = line[: line.rindex(b" # {")]
    labels, _, rest = line.rpartition(b"}")
    numbers = rest.split(None, 2)
    try:
        value = float(numbers[0])
        timestamp = float(numbers[1]) if len(numbers) > 1 else 0.0
    except (ValueError, IndexError):
        return None
    return Sample(labels, value, timestamp) if math.isfinite(value) else None


def _first(alternatives: Specs, samples: Samples) -> Sequence[Sample]:
    for spec in alternatives:
        if found := spec.select(samples):
            return found
    return ()


def _total(alternatives: Specs, samples: Samples) -> float:
    return min(max(0.0, sum(sample.value for sample in _first(alternatives, samples))), _COUNT_LIMIT)


def _known(alternatives: Specs, samples: Samples) -> float:
    """Return the total, or -1 if the exposition has none of these series."""
    return _total(alternatives, samples) if _first(alternatives, samples) else -1.0


def _sleep_level(dialect: Dialect, samples: Samples) -> int:
    if all(sample.value for sample in _first(dialect.awake, samples)):
        return 0
    return 2 if any(sample.value for sample in _first(dialect.discarded, samples)) else 1


def _share(found: Sequence[Sample]) -> float:
    return sum(min(max(sample.value, 0.0), 1.0) for sample in found) / len(found) if found else 0.0


def _count(value: float) -> int:
    return int(min(value, _COUNT_LIMIT))


def _blocks(dialect: Dialect, samples: Samples) -> tuple[int, int]:
    """Tokens per KV block, and blocks of all ranks together."""
    labels = [sample.labels for sample in _first(dialect.cache_info, samples)]
    if labels:
        sizes = [_number(label.get(dialect.block_size_label)) for label in labels]
        return max(sizes), _count(sum(_number(label.get(dialect.blocks_label)) for label in labels))
    size = max((sample.value for sample in _first(dialect.block_size, samples)), default=0.0)
    return _count(max(0.0, size)), _count(_total(dialect.blocks, samples))


def _number(text: str | None) -> int:
    """Engines write `None` before they know."""
    return int(text) if text and len(text) < 16 and text.isdecimal() else 0


def _adapters(found: Sequence[Sample]) -> tuple[frozenset[str], frozenset[str], int]:
    """Label sets of the past stay in the exposition; the value is the time each was last true."""
    if not found:
        return frozenset(), frozenset(), 0
    labels = max(found, key=lambda sample: sample.value).labels
    return (
        _names(labels.get("running_lora_adapters", "")),
        _names(labels.get("waiting_lora_adapters", "")),
        _number(labels.get("max_lora")),
    )


def _names(listed: str) -> frozenset[str]:
    return frozenset(_stripped(listed.split(",")))


def _stripped(names: Iterable[str]) -> Iterable[str]:
    return (name.strip() for name in names if name.strip())


def _attributes(dialect: Dialect, samples: Samples) -> dict[str, float]:
    """Of several series the newest counts, and the first where they have no timestamps."""
    found = ((key, spec.select(samples)) for key, spec in dialect.attributes)
    return {key: max(series, key=lambda sample: sample.timestamp).value for key, series in found if series}
