"""Which engine's exposition a text is, and which names of it are there. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from proxy.doctor.seen import CACHE, Exposition
from proxy.fleet.dialects import DIALECTS, Dialect, Specs
from proxy.fleet.scrape import ScrapeError, parse
from proxy.fleet.series import parse_labels

_CONNECTORS = {"vllm:nixl_": "nixl"}
"""By how their series begin; an engine has them from its start."""
_FAMILY = re.compile(rb"^([A-Za-z_:][A-Za-z0-9_:]*)", re.MULTILINE)


def read(text: bytes, seconds: float = 0.0) -> Exposition | None:
    """None if it is no engine's that is known."""
    names = {name.decode() for name in _FAMILY.findall(text)}
    engine, dialect = max(DIALECTS.items(), key=lambda item: len(item[1].names & names))
    if not dialect.names & names:
        return None
    try:
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
        labels=_cache_labels(text, dialect.cache_info, names),
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


def _cache_labels(text: bytes, specs: Specs, names: Collection[str]) -> Mapping[str, str]:
    line = re.search(rb"^" + re.escape(_found(specs, names).encode()) + rb"(\{.*\})", text, re.MULTILINE)
    return parse_labels(line[1]) if line and specs else {}
