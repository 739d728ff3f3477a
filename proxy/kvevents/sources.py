"""Where a pod publishes: by its URL, its labels and the settings for all pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.core.endpoint import RANK_LABEL, SIZE_LABEL, Endpoint
from proxy.core.kv import KvSources

EVENTS_PORT = "kvlane/kv-events-port"
REPLAY_PORT = "kvlane/kv-replay-port"


@dataclass(frozen=True, slots=True)
class Source:
    """`replay` is empty where nobody can be asked."""

    rank: int
    events: str
    replay: str = ""


def check(sources: KvSources) -> None:
    """Raises ValueError for an address that cannot be made."""
    try:
        made = sources.endpoint.format(host="pod", port=1)
    except (LookupError, ValueError):
        raise ValueError(
            f"endpoint: {sources.endpoint!r} may have {{host}} and {{port}} in it, no other names"
        ) from None
    for address in (made, sources.bind or made):
        if "://" not in address:
            raise ValueError(f"{address!r} is no address; write tcp://host:port")


def of(endpoint: Endpoint, sources: KvSources) -> list[Source]:
    """Return one per data-parallel rank, the ports counted up; of an endpoint that is a rank, its own. A label that is
    no number is ignored."""
    host = urlsplit(endpoint.url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = _number(endpoint.labels, EVENTS_PORT, sources.port)
    replay = _number(endpoint.labels, REPLAY_PORT, sources.replay_port)
    ranks = _number(endpoint.labels, SIZE_LABEL, sources.ranks)

    def address(number: int) -> str:
        return sources.endpoint.format(host=host, port=number)

    own = endpoint.rank if endpoint.rank is not None else _number(endpoint.labels, RANK_LABEL, -1)
    if own >= 0:
        return [Source(0, address(port + own), address(replay + own) if replay else "")]
    return [Source(rank, address(port + rank), address(replay + rank) if replay else "") for rank in range(ranks)]


def named(topic: str, endpoint: Endpoint) -> bool:
    """Whether the topic of a message, kv@pod@model, means the pod: by name, host:port or host."""
    parts = topic.split("@")
    if len(parts) < 2:
        return False
    url = urlsplit(endpoint.url)
    return parts[1] in (endpoint.name, endpoint.pod_name, url.netloc, url.hostname)


def _number(labels: Mapping[str, str], name: str, default: int) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and int(text) < 65536 else default
