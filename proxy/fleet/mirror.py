"""One fleet in several processes: the origin, which asks the pods, and mirrors, which are told of what it learns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import orjson

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.ports import Clock
from proxy.core.tls import PodTls
from proxy.fleet.records import Member
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet


class News(Enum):
    """What an origin says. Each says all there is to say of its subject: the last one counts, repeating it is harmless.

    POD      what a pod is like and whether it may be asked
    METRICS  its last scrape
    ROLL     the names of all pods there are: any other is gone
    """

    POD = "pod"
    METRICS = "metrics"
    ROLL = "roll"


Tell = Callable[[News, bytes], None]


class Origin(Fleet):
    """A fleet that calls `tell(news, record)` whenever something changes that a mirror must know."""

    def __init__(self, clock: Clock, tell: Tell, **keys: Any) -> None:
        """`keys`: those of a fleet."""
        super().__init__(clock, **keys)
        self._tell = tell
        self._restarts: dict[Endpoint, int] = {}
        self._told: dict[str, bytes] = {}

    def records(self) -> Iterator[tuple[News, bytes]]:
        """What a mirror must be told that knows nothing, or does not know what it missed."""
        for member in self._members.values():
            yield News.POD, self._pod(member)
            yield News.METRICS, _metrics(member.endpoint, self._clock.now())
        yield News.ROLL, self._roll()

    def restarted(self, endpoint: Endpoint) -> None:
        super().restarted(endpoint)
        if member := self._member_of(endpoint):
            self._restarts[endpoint] = self._restarts.get(endpoint, 0) + 1
            self._tell_of(member)

    def refreshed(self, endpoint: Endpoint) -> None:
        if self._member_of(endpoint):
            super().refreshed(endpoint)
            self._tell(News.METRICS, _metrics(endpoint, self._clock.now()))

    def _settle(self, member: Member) -> None:
        super()._settle(member)
        self._tell_of(member)

    def _name_models(self, member: Member) -> None:
        super()._name_models(member)
        self._tell_of(member)

    def _drop(self, member: Member) -> None:
        super()._drop(member)
        self._restarts.pop(member.endpoint, None)
        self._told.pop(member.endpoint.name, None)
        self._tell(News.ROLL, self._roll())

    def _tell_of(self, member: Member) -> None:
        """Pods repeat themselves every few seconds; only news are told."""
        record = self._pod(member)
        if self._told.get(member.endpoint.name) != record:
            self._told[member.endpoint.name] = record
            self._tell(News.POD, record)

    def _pod(self, member: Member) -> bytes:
        return orjson.dumps(
            {
                "pod": member.pod,
                "pool": member.endpoint.pool,
                "source": member.source,
                "contact": member.contact.value,
                "draining": member.draining,
                "leaving": member.leave_by is not None,
                "cards": member.cards,
                "restarts": self._restarts.get(member.endpoint, 0),
            }
        )

    def _roll(self) -> bytes:
        return orjson.dumps(list(self._members))


class Mirror(Fleet):
    """A fleet that does what it is told, and nothing of its own: pods leave it when they have left the origin.

    `told` raises ValueError, KeyError or TypeError for what no origin says, and has done nothing then."""

    def __init__(self, clock: Clock, **keys: Any) -> None:
        """`keys`: those of a fleet."""
        super().__init__(clock, **keys)
        self._restarts: dict[Endpoint, int] = {}

    def told(self, news: News, record: bytes) -> None:
        said = orjson.loads(record)
        if news is News.POD:
            self._take_pod(said)
        elif news is News.METRICS:
            self._take_metrics(said)
        else:
            self._take_roll(said)

    def _announce(self, endpoint: Endpoint, state: EndpointState) -> None:
        """The origin has said it."""

    def _take_pod(self, said: dict[str, Any]) -> None:
        tls = said["pod"]["tls"]
        own = {"models": tuple(said["pod"]["models"]), "tls": None if tls is None else PodTls(**tls)}
        pod = PodSettings(**{**said["pod"], **own})
        contact, restarts = EndpointState(said["contact"]), int(said["restarts"])
        member = self._members.get(pod.name)
        if member is not None and (member.endpoint.pool, member.pod.uid) != (said["pool"], pod.uid):
            self._gone(member)
            member = None
        if member is None:
            endpoint = self._join(pod, said["source"], said["pool"])
            member = self._members[endpoint.name]
        before, member.contact = member.contact, contact
        member.source, member.draining, member.cards = said["source"], said["draining"], said["cards"]
        member.leave_by = math.inf if said["leaving"] else None
        self._update(member, pod)
        if restarts > self._restarts.setdefault(member.endpoint, restarts):
            self._restarts[member.endpoint] = restarts
            self.restarted(member.endpoint)
        if contact is EndpointState.READY and before is not contact:
            self._call(self._on_ready, member.endpoint)

    def _take_metrics(self, said: dict[str, Any]) -> None:
        endpoint = self.get(said.pop("name"))
        age, in_flight = said.pop("age"), int(said.pop("in_flight"))
        for key in ("active_models", "waiting_models"):
            said[key] = frozenset(said[key])
        said["attributes"] = {key: math.nan if value is None else value for key, value in said["attributes"].items()}
        said["freshness"] = Freshness(said["freshness"])
        scraped_at = -math.inf if age is None else self._clock.now() - age
        metrics = Metrics(**said, scraped_at=scraped_at)
        if endpoint is not None:
            endpoint.publish(metrics, in_flight)
            self.refreshed(endpoint)

    def _take_roll(self, names: list[str]) -> None:
        there = set(names)
        for member in [member for name, member in self._members.items() if name not in there]:
            self._gone(member)

    def _gone(self, member: Member) -> None:
        self._restarts.pop(member.endpoint, None)
        self._drop(member)


def _metrics(endpoint: Endpoint, now: float) -> bytes:
    """Ages instead of times: no two clocks are compared. `in_flight` is what was on the pod when it was asked."""
    metrics = endpoint.metrics
    said = {item.name: getattr(metrics, item.name) for item in dataclasses.fields(metrics)}
    said["active_models"] = list(metrics.active_models)
    said["waiting_models"] = list(metrics.waiting_models)
    del said["scraped_at"]
    return orjson.dumps(
        {
            "name": endpoint.name,
            "age": now - metrics.scraped_at,
            "in_flight": endpoint.in_flight_at_scrape,
            **said,
            "freshness": metrics.freshness.value,
            "attributes": dict(metrics.attributes),
        }
    )
