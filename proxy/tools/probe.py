"""Probes of real pods for `kvlane doctor`: requests, connections, and tests of the behaviour of a pod."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from proxy import outbound
from proxy.core.endpoint import NEVER_SCRAPED, Endpoint
from proxy.core.errors import cause
from proxy.core.ports import Clock, Random
from proxy.fleet.dialects import DIALECTS, Dialect, Specs
from proxy.fleet.scrape import parse_models, parse_ranks
from proxy.http.rank import RANK_HEADER, body_for
from proxy.http.upstream.pool import IDLE_LIMIT
from proxy.telemetry.exposition import SampleReader, ScrapeError
from proxy.tools.findings import (
    CACHE,
    IS_KVLANE,
    METRICS_PATH,
    Caching,
    Events,
    ExpositionFinding,
    PodReport,
    Ranks,
    TransferFinding,
)

T = TypeVar("T")

METRICS_PATHS = (METRICS_PATH, "/prometheus/metrics")
"""Where engines serve their metrics; the second path is that of trtllm-serve."""

EVENTS_PORT = 5557
IDLE = IDLE_LIMIT + 2
REASON = "x-kvlane-reason"
"""Header of kvlane's errors. kvlane removes it from responses of pods."""
DATE_RESOLUTION = 0.5
"""Mean error of a Date header, in seconds."""


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """Options of `kvlane doctor`. `sends`: send requests that the engine must process."""

    api_key: str = ""
    timeout: float = 10.0
    sends: bool = True
    events_port: int = EVENTS_PORT
    idle: float = IDLE
    """Seconds for which an idle connection is watched."""
    reaction_time: float = 3.0
    """Seconds that a pod gets to notice a client's disconnection, and to update its counters."""


async def probe_pods(urls: Sequence[str], manner: ProbeOptions, clock: Clock, random: Random) -> list[PodReport]:
    async with outbound.session(manner.timeout) as session:
        pods = [PodClient(url.rstrip("/"), session, manner.api_key, clock) for url in urls]
        return await asyncio.gather(*(_probe(pod, manner, random) for pod in pods))


async def _probe(pod: PodClient, manner: ProbeOptions, random: Random) -> PodReport:
    try:
        health = await pod.fetch("/health")
    except outbound.FAILURES as error:
        return PodReport(pod.url, unreachable=cause(error))
    metrics = await _or_none(pod.fetch(METRICS_PATH))  # a path that one of kvlane's two ports does not have
    if any(REASON in reply.headers for reply in (health, metrics) if reply is not None):
        return PodReport(pod.url, unreachable=IS_KVLANE)
    report = PodReport(pod.url, health=health.status, skew=_skew(health, pod.clock))
    idle = idle_seconds(pod.url, manner.idle, pod.clock)
    _, report.keep_alive = await asyncio.gather(_observe(pod, report, manner, random), idle)
    return report


async def _observe(pod: PodClient, seen: PodReport, manner: ProbeOptions, random: Random) -> None:
    """Observe a pod step by step, so that trials do not disturb each other."""
    version = await _or_none(pod.fetch("/version"))
    seen.version = str(version.json.get("version") or "") if version else ""
    await _read_models(pod, seen)
    await _read_metrics(pod, seen)
    seen.events = await _or_none(_events(pod, manner))
    seen.tokenize = await _or_none(try_tokenize(pod, seen))
    if not manner.sends:
        return
    seen.caching = await _or_none(try_caching(pod, seen, manner.reaction_time, random))
    if seen.exposition is not None and len(seen.exposition.ranks) > 1:
        seen.ranks = await _or_none(try_ranks(pod, seen, manner.reaction_time))
    seen.transfer = await _or_none(read_transfer(pod, seen)) or seen.transfer
    seen.abort = await _or_none(try_abort(pod, seen, manner.reaction_time))


async def _read_metrics(pod: PodClient, seen: PodReport) -> None:
    for path in METRICS_PATHS:
        metrics = await _or_none(pod.fetch(path))
        if metrics is not None and metrics.ok and (found := read_exposition(metrics.body, metrics.seconds)):
            seen.exposition, seen.metrics_path = found, path
            seen.says_caching = {"True": True, "False": False}.get(found.labels.get("enable_prefix_caching", ""))
            return


async def _read_models(pod: PodClient, seen: PodReport) -> None:
    listed = await _or_none(pod.fetch("/v1/models"))
    try:
        cards = parse_models(listed.body) if listed is not None and listed.ok else ()
    except ScrapeError:
        cards = ()
    own = [card for card in cards if not card.get("parent")]
    seen.models = tuple(card["id"] for card in own)
    lengths = (card.get("max_model_len") for card in own)
    seen.max_model_len = next((length for length in lengths if isinstance(length, int)), None)


async def _events(pod: PodClient, manner: ProbeOptions) -> Events:
    host = urlsplit(pod.url).hostname or ""
    sources = (await pod.fetch("/kv_event_sources")).json
    first: Mapping[str, Any] = sources["0"] if isinstance(sources.get("0"), dict) else {}
    announced, replay = _port(first.get("endpoint")), _port(first.get("replay_endpoint"))
    port = announced or manner.events_port
    return Events(
        host=host,
        port=port,
        speaks=await speaks_zmtp(host, port, manner.timeout / 4),
        announced=announced > 0,
        replay=await speaks_zmtp(host, replay, manner.timeout / 4) if replay else None,
    )


def _port(endpoint: Any) -> int:
    tail = str(endpoint or "").rpartition(":")[2]
    return int(tail) if tail.isdecimal() else 0


def _skew(reply: Reply, clock: Clock) -> float | None:
    try:
        date = parsedate_to_datetime(reply.headers["date"]).timestamp()
    except (KeyError, ValueError):
        return None
    return date + DATE_RESOLUTION - (clock.wall() - reply.seconds / 2)


async def _or_none(request: Awaitable[T]) -> T | None:
    try:
        return await request
    except outbound.FAILURES:
        return None


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    headers: Mapping[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def json(self) -> Mapping[str, Any]:
        """Return the JSON object of the body; empty if it is not one."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}


class PodClient:
    """The HTTP client of one pod. Raises aiohttp.ClientError and TimeoutError, as aiohttp does."""

    def __init__(self, url: str, session: aiohttp.ClientSession, api_key: str, clock: Clock) -> None:
        self.url = url
        self.clock = clock
        self._session = session
        self._headers = outbound.bearer(api_key)

    async def fetch(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        started, method = self.clock.now(), "GET" if body is None else "POST"
        status, read, received = await outbound.send(
            self._session, method, self.url + path, json=body, headers={**self._headers, **(headers or {})}
        )
        return Reply(status, read, received, self.clock.now() - started)

    async def stream(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """Send a request and return the unread response, which the caller closes."""
        return await self._session.post(self.url + path, json=body, headers=self._headers)


COMPLETIONS = "/v1/completions"
LONG = 4096
"""Number of tokens of a response that is aborted."""
ENGINE_CONNECTORS = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "ExampleConnector": "shared-storage",
    "SharedStorageConnector": "shared-storage",
    "MooncakeConnector": "mooncake",
    "P2pNcclConnector": "p2p-nccl",
}
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}

_CONNECTOR_NAME = re.compile(rb"kv_connector\W{1,6}(\w+)")
_ROLE = re.compile(rb"kv_role\W{1,6}(kv_\w+)")


async def try_caching(pod: PodClient, seen: PodReport, reaction_time: float, random: Random) -> Caching:
    """Check whether the second of two equal prompts uses the cache. With data-parallel ranks, send one further request
    per rank, so that two of them reach the same rank."""
    block = seen.exposition.metrics.block_size if seen.exposition else 0
    nonce = f"{random.random():.15f}"
    body = _body(seen, f"{nonce} " + "the sea " * 2 * max(block, 16), max_tokens=1)
    found = Caching()
    for times in range(1 + max(1, len(seen.exposition.ranks) if seen.exposition else 1)):
        reply = await pod.fetch(COMPLETIONS, body)
        if not reply.ok:
            return Caching(refused=f"{COMPLETIONS} returns {reply.status}")
        usage = reply.json.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        found = Caching(reported=details.get("cached_tokens"), prompt_tokens=int(usage.get("prompt_tokens") or 0))
        if times == 0:
            before = (await _scraped(pod, seen)).metrics.prefix_hits
        elif found.reported:
            break
    if found.reported is not None:
        return found
    if seen.exposition is None or not seen.exposition.counts_hits:
        return Caching(refused="neither responses nor metrics report cached tokens")
    begun, counted = pod.clock.now(), 0.0
    while not counted and pod.clock.now() < begun + reaction_time:
        counted = (await _scraped(pod, seen)).metrics.prefix_hits - before
        await asyncio.sleep(0.1)
    return replace(found, counted=counted)


async def try_ranks(pod: PodClient, seen: PodReport, reaction_time: float) -> Ranks:
    """Send as many requests as there are data-parallel ranks to the last one, and see which counters grow."""
    before = (await _scraped(pod, seen)).ranks
    last = len(before) - 1
    endpoint = Endpoint("", engine=seen.engine, rank=last)
    body = orjson.loads(body_for(endpoint, orjson.dumps(_body(seen, "the sea", max_tokens=1))))
    for _ in before:
        await pod.fetch(COMPLETIONS, body, {RANK_HEADER: str(last)})
    begun, grown = pod.clock.now(), [0.0 for _ in before]
    while not any(grown) and pod.clock.now() < begun + reaction_time:
        now = (await _scraped(pod, seen)).ranks
        grown = [after.prompt_tokens - one.prompt_tokens for after, one in zip(now, before, strict=True)]
        await asyncio.sleep(0.1)
    return Ranks(grown[last], sum(grown[:last]))


async def try_tokenize(pod: PodClient, seen: PodReport) -> float | None:
    """Return the seconds that /tokenize takes for about a thousand tokens; None if it does not exist."""
    body = {"prompt": "the sea " * 500} | ({"model": seen.models[0]} if seen.models else {})
    replies = [await pod.fetch("/tokenize", body) for _ in range(5)]
    return median(reply.seconds for reply in replies) if all(reply.ok for reply in replies) else None


async def read_transfer(pod: PodClient, seen: PodReport) -> TransferFinding:
    """Return the transfer that the engine reports in its configuration or its series; for NIXL also the parameters that
    a prompt leaves for another pod. Other connectors get no request: some end the engine over a missing field."""
    if seen.engine == "sglang":
        info = (await pod.fetch("/get_server_info")).json
        mode = str(info.get("disaggregation_mode") or "")
        return TransferFinding("sglang", mode) if mode in ("prefill", "decode") else TransferFinding()
    server_info = (await pod.fetch("/server_info")).body
    name, role = _CONNECTOR_NAME.search(server_info), _ROLE.search(server_info)
    found = TransferFinding(seen.exposition.connector if seen.exposition else "")
    if name and name[1] != b"None":
        engines = name[1].decode()
        known = ENGINE_CONNECTORS.get(engines, "")
        found = TransferFinding(known, ROLES.get(role[1].decode() if role else "", ""), "" if known else engines)
    if found.connector != "nixl":
        return found
    left = await pod.fetch(
        COMPLETIONS,
        _body(seen, "the sea", max_tokens=1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False}),
    )
    params = left.json.get("kv_transfer_params") if left.ok else None
    if not isinstance(params, dict) or "remote_engine_id" not in params:
        return found
    return replace(found, host=str(params.get("remote_host") or ""))


async def try_abort(pod: PodClient, seen: PodReport, reaction_time: float) -> float | None:
    """Return the seconds from leaving a stream to its end on the pod; None if not visible, as with other requests."""
    length = min(LONG, (seen.max_model_len or LONG) - 64)
    response = await pod.stream(
        COMPLETIONS, _body(seen, "the sea", max_tokens=max(length, 1), stream=True, ignore_eos=True)
    )
    try:
        if response.status != 200:
            return None
        await response.content.readany()
        running = await _running(pod, seen)
    finally:
        response.close()
    begun = pod.clock.now()
    while running == 1 and pod.clock.now() < begun + reaction_time:
        if not await _running(pod, seen):
            return pod.clock.now() - begun
        await asyncio.sleep(0.05)
    return math.inf if running == 1 else None


def _body(seen: PodReport, prompt: str, **more: Any) -> dict[str, Any]:
    model = {"model": seen.models[0]} if seen.models else {}
    return {**model, "prompt": prompt, "temperature": 0, **more}


async def _scraped(pod: PodClient, seen: PodReport) -> ExpositionFinding:
    """Return the metrics of the pod; without values if its engine is unknown."""
    text = (await pod.fetch(seen.metrics_path)).body
    return read_exposition(text) or ExpositionFinding("", NEVER_SCRAPED, len(text), 0.0)


async def _running(pod: PodClient, seen: PodReport) -> int:
    total = (await _scraped(pod, seen)).metrics
    return total.running + total.waiting


ZMTP = b"\xff", b"\x7f"
"""Beginning and end of the first ten bytes of a peer (ZMTP 3.1, section 3.1)."""


async def idle_seconds(url: str, patience: float, clock: Clock) -> float | None:
    """Return the seconds until the pod closes an idle connection; infinite if that takes longer than `patience`, 0 if
    it closes the connection after the response, None without a response."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    port = parts.port or (443 if is_tls else 80)
    ask = f"GET {parts.path}/health HTTP/1.1\r\nhost: {parts.netloc}\r\n\r\n".encode()
    try:
        async with _connected(parts.hostname or "", port, patience, is_tls) as (reader, writer):
            writer.write(ask)
            async with asyncio.timeout(patience):
                head = await reader.readuntil(b"\r\n\r\n")
            if b"connection: close" in head.lower():
                return 0.0
            begun = clock.now()
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await reader.read()
                return clock.now() - begun
            return math.inf
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return None


async def speaks_zmtp(host: str, port: int, patience: float) -> bool:
    """Return whether a ZeroMQ socket is bound at the address."""
    try:
        async with _connected(host, port, patience) as (reader, writer):
            writer.write(ZMTP[0] + bytes(8) + ZMTP[1])
            async with asyncio.timeout(patience):
                greeting = await reader.readexactly(10)
            return (greeting[:1], greeting[-1:]) == ZMTP
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


@asynccontextmanager
async def _connected(
    host: str, port: int, patience: float, is_tls: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(host, port, ssl=is_tls or None)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


NIXL_SERIES = "vllm:nixl_"
"""The prefix of NIXL's series, which an engine exposes from its start."""
_READER = SampleReader()


def read_exposition(text: bytes, seconds: float = 0.0) -> ExpositionFinding | None:
    """Return what the exposition shows, or None if its engine is unknown."""
    try:
        samples = _READER.read(text)
        names = samples.keys()
        engine, dialect = max(DIALECTS.items(), key=lambda item: len(item[1].names & names))
        scrape = parse_ranks(text, dialect)
    except ScrapeError:
        return None
    parts, cache = _parts(dialect), samples.get(_found(dialect.cache_info, names))
    return ExpositionFinding(
        engine=engine,
        metrics=scrape.total,
        size=len(text),
        seconds=seconds,
        missing=tuple(part for part, specs in parts.items() if not _found(specs, names)),
        counts_hits=bool(_found(dialect.prefix_hits, names)),
        old=tuple(name for specs in parts.values() if (name := _found(specs, names)) and name != specs[0].name),
        labels=cache[0].labels if cache else {},
        connector="nixl" if any(name.startswith(NIXL_SERIES) for name in names) else "",
        ranks=tuple(scrape.ranks),
    )


def _parts(dialect: Dialect) -> Mapping[str, Specs]:
    """Return the parts that placement reads, as far as the engine exposes them."""
    parts = {
        "waiting": dialect.waiting,
        "running": dialect.running,
        "kv_usage": dialect.kv_usage,
        CACHE: dialect.cache_info or dialect.blocks,
        "prefix_queries": dialect.prefix_queries,
        "prefix_hits": dialect.prefix_hits,
    }
    return {part: specs for part, specs in parts.items() if specs}


def _found(specs: Specs, names: Collection[str]) -> str:
    return next((spec.name for spec in specs if spec.name in names), "")
