"""Looks at pods: at what they say, and at what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from proxy import outbound
from proxy.core.errors import cause
from proxy.core.ports import Clock, Random
from proxy.doctor import exposition, lines, trials
from proxy.doctor.asking import Answer, Asking
from proxy.doctor.seen import Events, Seen
from proxy.fleet.scrape import parse_models
from proxy.http.upstream.pool import IDLE_LIMIT
from proxy.telemetry.prometheus_text import ScrapeError

T = TypeVar("T")

EVENTS_PORT = 5557
IDLE = IDLE_LIMIT + 2
DATE_RESOLUTION = 0.5
"""Seconds: what a Date header leaves out, on average."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How pods are looked at; `sends` is whether they get requests that make them work."""

    api_key: str = ""
    timeout: float = 10.0
    sends: bool = True
    events_port: int = EVENTS_PORT
    idle: float = IDLE
    """Seconds that an idle connection is watched."""
    settle: float = 3.0
    """Seconds in which a pod notices that a client has left, and its counters that it has worked."""


async def look_at(urls: Sequence[str], manner: Manner, clock: Clock, random: Random) -> list[Seen]:
    """All at once, in their order."""
    async with outbound.session(manner.timeout) as session:
        pods = [Asking(url.rstrip("/"), session, manner.api_key, clock) for url in urls]
        return await asyncio.gather(*(_look(pod, manner, random) for pod in pods))


async def _look(pod: Asking, manner: Manner, random: Random) -> Seen:
    try:
        health = await pod.get("/health")
    except outbound.FAILURES as error:
        return Seen(pod.url, unreachable=cause(error))
    asked = _ask(pod, health, manner, random)
    said, kept = await asyncio.gather(asked, lines.keep_alive(pod.url, manner.idle, pod.clock))
    return replace(said, keep_alive=kept)


async def _ask(pod: Asking, health: Answer, manner: Manner, random: Random) -> Seen:
    """One after the other, so that no trial is in another's way."""
    seen = Seen(pod.url, health=health.status, skew=_skew(health, pod.clock))
    version = await _unless_it_fails(pod.get("/version"))
    seen = replace(seen, version=str(version.json.get("version") or "") if version else "", **await _models(pod))
    answer = await _unless_it_fails(pod.get("/metrics"))
    if answer is not None and answer.ok and (found := exposition.read(answer.body, answer.seconds)):
        says = {"True": True, "False": False}.get(found.labels.get("enable_prefix_caching", ""))
        seen = replace(seen, exposition=found, says_caching=says)
    seen = replace(
        seen,
        events=await _unless_it_fails(_events(pod, manner)),
        tokenize=await _unless_it_fails(trials.tokenize(pod, seen)),
    )
    return await _try(pod, seen, manner.settle, random) if manner.sends else seen


async def _try(pod: Asking, seen: Seen, settle: float, random: Random) -> Seen:
    seen = replace(seen, caching=await _unless_it_fails(trials.caching(pod, seen, settle, random)))
    if found := await _unless_it_fails(trials.transfer(pod, seen)):
        seen = replace(seen, transfer=found)
    return replace(seen, abort=await _unless_it_fails(trials.abort(pod, seen, settle)))


async def _models(pod: Asking) -> Mapping[str, Any]:
    """Those that are no adapters."""
    answer = await _unless_it_fails(pod.get("/v1/models"))
    try:
        cards = parse_models(answer.body) if answer is not None and answer.ok else ()
    except ScrapeError:
        cards = ()
    own = [card for card in cards if not card.get("parent")]
    length = next((card["max_model_len"] for card in own if isinstance(card.get("max_model_len"), int)), None)
    return {"models": tuple(card["id"] for card in own), "max_model_len": length}


async def _events(pod: Asking, manner: Manner) -> Events:
    host = urlsplit(pod.url).hostname or ""
    sources = (await pod.get("/kv_event_sources")).json
    first: Mapping[str, Any] = sources["0"] if isinstance(sources.get("0"), dict) else {}
    announced, replay = _port(first.get("endpoint")), _port(first.get("replay_endpoint"))
    port = announced or manner.events_port
    return Events(
        host=host,
        port=port,
        speaks=await lines.speaks_zmtp(host, port, manner.timeout / 4),
        announced=announced > 0,
        replay=await lines.speaks_zmtp(host, replay, manner.timeout / 4) if replay else None,
    )


def _port(endpoint: Any) -> int:
    """0 if there is none."""
    tail = str(endpoint or "").rpartition(":")[2]
    return int(tail) if tail.isdecimal() else 0


def _skew(answer: Answer, clock: Clock) -> float | None:
    try:
        told = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    return told + DATE_RESOLUTION - (clock.wall() - answer.seconds / 2)


async def _unless_it_fails(asked: Awaitable[T]) -> T | None:
    try:
        return await asked
    except outbound.FAILURES:
        return None
