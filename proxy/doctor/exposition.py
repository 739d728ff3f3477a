"""Which engine's exposition a text is, and which names of it are there. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from proxy.doctor.seen import CACHE, Exposition
from proxy.fleet.dialects import DIALECTS, Dialect, Specs
from proxy.fleet.scrape import parse
from proxy.telemetry.prometheus_text import SampleReader, Samples, ScrapeError

_CONNECTORS = {"vllm:nixl_": "nixl"}
"""By how their series begin; an engine has them from its start."""
_READER = SampleReader()


def read(text: bytes, seconds: float = 0.0) -> Exposition | None:
    """Return what the exposition shows, or None if its engine is unknown."""
    try:
        samples = _READER.read(text)
        names = samples.keys()
        engine, dialect = max(DIALECTS.items(), key=lambda item: len(item[1].names & names))
        metrics = parse(text, dialect)
    except ScrapeError:
        return None
    parts = _parts(dialect)
    return Exposition(
        engine=engine,
        metrics=metrics,
        size=len(text),
        seconds=seconds,
        missing=tuple(part for part, specs in parts.items() if not _found(specs, names)),
        old=tuple(name for specs in parts.values() if (name := _found(specs, names)) and name != specs[0].name),
        labels=_cache_labels(dialect.cache_info, samples),
        connector=_connector(names),
    )


def _parts(dialect: Dialect) -> Mapping[str, Specs]:
    """What placement reads, as far as the engine exposes it at all."""
    parts = {
        "waiting": dialect.waiting,
        "running": dialect.running,
        "kv_usage": dialect.kv_usage,
        CACHE: dialect.cache_info or dialect.blocks,
        "prefix_queries": dialect.prefix_queries,
        "prefix_hits": dialect.prefix_hits,
    }
    return {part: specs for part, specs in parts.items() if specs}


def _connector(names: Collection[str]) -> str:
    return next((connector for name in names for at, connector in _CONNECTORS.items() if name.startswith(at)), "")


def _found(specs: Specs, names: Collection[str]) -> str:
    return next((spec.name for spec in specs if spec.name in names), "")


def _cache_labels(specs: Specs, samples: Samples) -> Mapping[str, str]:
    found = samples.get(_found(specs, samples.keys()))
    return found[0].labels if found else {}
