"""Values of Prometheus queries.

See https://prometheus.io/docs/prometheus/latest/querying/api/#instant-queries.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from proxy import outbound
from proxy.autoscale.policy import number
from proxy.autoscale.settings import PROMQL, PrometheusSettings, ScalingPolicy
from proxy.core.ports import Clock

log = logging.getLogger(__name__)


TIMEOUT = 5.0
"""Seconds for the response to one query."""


async def ask(settings: PrometheusSettings | None, query: str) -> float:
    """Return the current value of a query. Raise QueryFailed."""
    if settings is None:
        raise QueryFailed("no Prometheus is configured")
    try:
        headers, tls = await asyncio.to_thread(_identity, settings)
        url = f"{settings.url.rstrip('/')}/api/v1/query"
        response = await outbound.fetch("GET", url, TIMEOUT, tls=tls, headers=headers, params={"query": query})
        content = orjson.loads(response.body)
    except (*outbound.FAILURES, ValueError) as error:
        raise QueryFailed(f"{type(error).__name__}: {error}") from None
    return value_of(content)


def value_of(content: Any) -> float:
    """Return the value of a scalar or a vector of one element. Raise QueryFailed."""
    try:
        return _value_of(content)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise QueryFailed(f"not a scalar or a vector of one element ({type(error).__name__})") from None


def _value_of(content: Any) -> float:
    if not isinstance(content, dict) or content.get("status") != "success":
        raise QueryFailed(
            str(content.get("error", content)) if isinstance(content, dict) else "not a response of Prometheus"
        )
    found = content.get("data", {})
    kind, result = found.get("resultType"), found.get("result")
    if kind == "vector" and len(result) != 1:
        raise QueryFailed(f"{len(result)} series, and not one" if result else "no series")
    if kind not in ("scalar", "vector"):
        raise QueryFailed(f"a {kind}, and not a scalar or a vector")
    text = result[1] if kind == "scalar" else result[0]["value"][1]
    value = number(float(text))
    if value is None:
        raise QueryFailed(f"{text} is no finite number")
    return value


def _identity(settings: PrometheusSettings) -> tuple[dict[str, str], ssl.SSLContext | bool]:
    """Return the authentication headers and the TLS context. Raise OSError or ValueError for unusable files."""
    token = Path(settings.token_file).read_text().strip() if settings.token_file else settings.token
    return outbound.bearer(token), outbound.tls_context(settings.ca_file) if settings.ca_file else True


class QueryFailed(Exception):
    """The query has no value; the message says why."""


Ask = Callable[[str], Awaitable[float]]
"""A function that returns the value of a query; it raises QueryFailed."""


@dataclass(slots=True)
class Queries:
    """The queries of one pool. `values` are by source, with their times: a value that is not renewed becomes stale."""

    ask: Ask
    clock: Clock
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    _failing: set[str] = field(default_factory=set)

    async def update(self, pool: ScalingPolicy) -> None:
        sources = _queries_of(pool)
        for gone in self.values.keys() - sources:
            del self.values[gone]
        await asyncio.gather(*(self._update(source) for source in sources))

    async def _update(self, source: str) -> None:
        """Log the first failure in a row."""
        query = source.removeprefix(PROMQL).strip()
        try:
            self.values[source] = (await self.ask(query), self.clock.now())
            self._failing.discard(source)
        except QueryFailed as why:
            if source not in self._failing:
                log.warning("autoscale: the query %r has no value: %s", query, why)
            self._failing.add(source)


def _queries_of(pool: ScalingPolicy) -> set[str]:
    sources = [one.source for metrics in (pool.metrics, *(role.metrics for role in pool.roles)) for one in metrics]
    sources += [one.source for signals in pool.coordination.signals.values() for one in signals.values()]
    return {source for source in sources if source.startswith(PROMQL)}
