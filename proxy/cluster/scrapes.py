"""Scrapes of pods, which the hosts of a deployment divide among themselves."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import orjson
from xxhash import xxh3_64_intdigest

from proxy.cluster.messages import FrameKind, InvalidMessage
from proxy.cluster.replica import Replica
from proxy.cluster.shared import Shared
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.fleet.mirror import dumped, metrics_values, read_metrics
from proxy.fleet.store import Fleet
from proxy.polling import Polling

LONGEST = 60.0
"""Seconds for which a scrape by another host counts at most."""


class SharedScrapes(Shared):
    """The scrapes of each pod by the first host that reaches it.

    The hosts have another order for each pod (rendezvous hashing). Each host publishes its scrapes, and does not scrape
    a pod for which it receives scrapes from a host before it in this order. So no agreement is needed: a pod is scraped
    by the first host that knows and reaches it, and by the next one when those scrapes stop.
    """

    kinds = (FrameKind.SCRAPE,)

    def __init__(
        self, replica: Replica, fleet: Fleet, polling: Polling, clock: Clock, config: Callable[[], str]
    ) -> None:
        """`config` returns the digest of the configuration in use. Hosts with another one may read other metrics."""
        self._replica = replica
        self._fleet = fleet
        self._polling = polling
        self._clock = clock
        self._config = config
        polling.scraped = self._scraped

    def receive(self, peer: int, kind: FrameKind, body: bytes) -> None:
        match orjson.loads(body):
            case [str(name), int(priority), int(source), int(seconds) | float(seconds), int(listed), list(ranks)]:
                scraped = [read_metrics(values, self._clock.now()) for values in ranks]
            case _:
                raise InvalidMessage("not a scrape of a pod")
        pod = self._fleet.get(name)
        if pod is None or priority <= self._priority(pod) or source != self._source(pod):
            return
        if refresher := self._polling.refresher_of(pod):
            refresher.receive(min(seconds, LONGEST), listed, scraped)

    def _scraped(self, pod: Endpoint, seconds: float, listed: int) -> None:
        if self._replica.place[0] == 1:
            return  # there is no other host
        ranks = [metrics_values(rank, self._clock.now()) for rank in pod.ranks] if seconds else []
        scrape = pod.pod_name, self._priority(pod), self._source(pod), round(seconds, 3), listed, ranks
        self._replica.publish_to_all(FrameKind.SCRAPE, dumped(scrape))

    def _priority(self, pod: Endpoint) -> int:
        """Return the priority of this host for a pod."""
        return xxh3_64_intdigest(self._replica.host + pod.pod_name.encode("utf-8", "surrogatepass")) >> 32

    def _source(self, pod: Endpoint) -> int:
        return crc32(f"{self._config()} {pod.url}".encode())
