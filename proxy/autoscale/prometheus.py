"""Values of Prometheus queries: https://prometheus.io/docs/prometheus/latest/querying/api/#instant-queries."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import orjson

from proxy import outbound
from proxy.autoscale.queries import Unanswered
from proxy.autoscale.readings import number
from proxy.autoscale.sources import PrometheusSettings


async def ask(settings: PrometheusSettings, query: str) -> float:
    """The value now. Raises Unanswered."""
    try:
        headers, trust = await asyncio.to_thread(_identity, settings)
        url = f"{settings.url.rstrip('/')}/api/v1/query"
        response = await outbound.fetch(
            "GET", url, settings.timeout, tls=trust, headers=headers, params={"query": query}
        )
        said = orjson.loads(response.body)
    except (*outbound.FAILURES, ValueError) as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from None
    return value_of(said)


def value_of(said: Any) -> float:
    """Of a scalar or a vector of one element. Raises Unanswered."""
    if not isinstance(said, dict) or said.get("status") != "success":
        raise Unanswered(str(said.get("error", said)) if isinstance(said, dict) else "no answer of Prometheus")
    found = said.get("data", {})
    kind, result = found.get("resultType"), found.get("result")
    if kind == "vector" and len(result) != 1:
        raise Unanswered(f"{len(result)} series, and not one" if result else "no series")
    if kind not in ("scalar", "vector"):
        raise Unanswered(f"a {kind}, and not a scalar or a vector")
    text = result[1] if kind == "scalar" else result[0]["value"][1]
    value = number(float(text))
    if value is None:
        raise Unanswered(f"{text} is no finite number")
    return value


def _identity(settings: PrometheusSettings) -> tuple[dict[str, str], ssl.SSLContext | bool]:
    """Raises OSError or ValueError for files that cannot be used."""
    token = Path(settings.token_file).read_text().strip() if settings.token_file else settings.token
    return outbound.bearer(token), outbound.tls_context(settings.ca_file) if settings.ca_file else True
