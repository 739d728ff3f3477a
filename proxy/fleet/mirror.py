"""One fleet in several processes: the origin scrapes the pods, and mirrors repeat its state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import orjson

from proxy.core.endpoint import NEVER_SCRAPED, Endpoint, EndpointState, Freshness, Metrics, PodTls
from proxy.core.ports import Clock
from proxy.fleet.records import Contact, PodRecord
from proxy.fleet.settings import DataParallelSettings, PodSettings
from proxy.fleet.store import Fleet


class MessageKind(IntEnum):
    """The kinds of messages of an origin, with their numbers in `cluster.messages.RecordKind`. A message has the whole
    state of its subject, so repeating one is harmless.

    POD      settings and state of a pod
    METRICS  the last scrape of an endpoint
    ROLL     the names of all pods; any other one is gone
    """

    POD = 1
    METRICS = 2
    ROLL = 3


Publish = Callable[[MessageKind, bytes], None]


class MirroredFleet(Fleet):
    """A fleet that calls `publish(kind, message)` after every change that a mirror needs."""

    def __init__(self, clock: Clock, publish: Publish, **keys: Any) -> None:
        """`keys`: the keyword arguments of a fleet."""
        super().__init__(clock, **keys)
        self._publish = publish
        self._restarts: dict[str, int] = {}
        self._published: dict[str, bytes] = {}

    def messages(self) -> Iterator[tuple[MessageKind, bytes]]:
        """Yield the whole state, for a mirror that starts or has missed messages."""
        for record in self._records.values():
            yield MessageKind.POD, self._pod(record)
            for endpoint in record.endpoints:
                yield MessageKind.METRICS, self._metrics(endpoint)
        yield MessageKind.ROLL, self._roll()

    def restarted(self, endpoint: Endpoint) -> None:
        super().restarted(endpoint)
        if record := self._record_of(endpoint):
            self._restarts[record.name] = self._restarts.get(record.name, 0) + 1
            self._publish_pod(record)

    def refreshed(self, endpoint: Endpoint) -> None:
        if self._record_of(endpoint):
            super().refreshed(endpoint)
            self._publish(MessageKind.METRICS, self._metrics(endpoint))

    def _update_state(self, record: PodRecord) -> None:
        super()._update_state(record)
        self._publish_pod(record)

    def _name_models(self, record: PodRecord) -> None:
        super()._name_models(record)
        self._publish_pod(record)

    def _drop(self, record: PodRecord) -> None:
        super()._drop(record)
        self._restarts.pop(record.name, None)
        self._published.pop(record.name, None)
        self._publish(MessageKind.ROLL, self._roll())

    def _publish_pod(self, record: PodRecord) -> None:
        """Publish the state of the pod if it has changed."""
        message = self._pod(record)
        if self._published.get(record.name) != message:
            self._published[record.name] = message
            self._publish(MessageKind.POD, message)

    def _pod(self, record: PodRecord) -> bytes:
        return orjson.dumps(
            {
                "pod": record.pod,
                "pool": record.endpoint.pool,
                "source": record.source,
                "contact": record.contact.value,
                "drained_by": sorted(record.drained_by),
                "leaving": record.leave_by is not None,
                "cards": record.cards,
                "restarts": self._restarts.get(record.name, 0),
                "ranks": len(record.endpoints),
            }
        )

    def _metrics(self, endpoint: Endpoint) -> bytes:
        return dumped({"name": endpoint.name, **metrics_values(endpoint, self._clock.now())})

    def _roll(self) -> bytes:
        return orjson.dumps(list(self._records))


class Mirror(Fleet):
    """A fleet that repeats another one. A pod leaves it when it has left the origin. `apply` raises ValueError,
    KeyError or TypeError for an invalid message and changes nothing then."""

    def __init__(self, clock: Clock, **keys: Any) -> None:
        """`keys`: the keyword arguments of a fleet."""
        super().__init__(clock, **keys)
        self._restarts: dict[str, int] = {}

    def apply(self, kind: MessageKind, message: bytes) -> None:
        values = orjson.loads(message)
        if kind is MessageKind.POD:
            self._apply_pod(values)
        elif kind is MessageKind.METRICS:
            self._apply_metrics(values)
        else:
            self._apply_roll(values)

    def _announce(self, record: PodRecord, was: EndpointState, state: EndpointState) -> None:
        """Log nothing: the origin has logged it."""

    def _apply_pod(self, values: dict[str, Any]) -> None:
        pod, ranks = _pod_settings(values["pod"]), int(values["ranks"])
        contact, restarts = Contact(values["contact"]), int(values["restarts"])
        record = self._records.get(pod.name)
        if record is not None and (record.endpoint.pool, record.pod.uid) != (values["pool"], pod.uid):
            self._gone(record)
            record = None
        if record is None:
            self._join(pod, values["source"], values["pool"])
            record = self._records[pod.name]
        before, could_serve, record.contact = record.contact, record.can_serve, contact
        record.source, record.drained_by, record.cards = values["source"], values["drained_by"], values["cards"]
        record.leave_by = math.inf if values["leaving"] else None
        if len(record.endpoints) != ranks:
            self._resize(record, ranks)
        self._update(record, pod)
        if record.can_serve is not could_serve:
            self._ejections.reconsider()
        if restarts > self._restarts.setdefault(record.name, restarts):
            self._restarts[record.name] = restarts
            self.restarted(record.endpoint)
        if contact is Contact.RESPONDS and before is not contact:
            for endpoint in record.endpoints:
                self._call(self.on_ready, endpoint)

    def _apply_metrics(self, values: dict[str, Any]) -> None:
        endpoint = self.get(values["name"])
        metrics, in_flight = read_metrics(values, self._clock.now())
        if endpoint is not None:
            endpoint.publish(metrics, in_flight)
            self.refreshed(endpoint)

    def _apply_roll(self, names: list[str]) -> None:
        there = set(names)
        for record in [record for name, record in self._records.items() if name not in there]:
            self._gone(record)

    def _gone(self, record: PodRecord) -> None:
        self._restarts.pop(record.name, None)
        self._drop(record)


def _pod_settings(values: dict[str, Any]) -> PodSettings:
    tls, ranks = values["tls"], values["data_parallel"]
    own = {
        "models": tuple(values["models"]),
        "tls": None if tls is None else PodTls(**tls),
        "data_parallel": None if ranks is None else DataParallelSettings(**ranks),
    }
    return PodSettings(**{**values, **own})


def metrics_values(endpoint: Endpoint, now: float) -> dict[str, Any]:
    """Return the last scrape of an endpoint for other processes: its age, because clocks differ, the requests in flight
    when it was sent, and all values that are not the default."""
    metrics = endpoint.metrics
    values = {name: value for name, default in _DEFAULTS.items() if (value := getattr(metrics, name)) != default}
    return {"age": round(now - metrics.scraped_at, 4), "in_flight": endpoint.in_flight_at_scrape, **values}


def dumped(message: Any) -> bytes:
    """Return a message, with values of scrapes in it, as JSON."""
    return orjson.dumps(message, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value))


def read_metrics(values: Mapping[str, Any], now: float) -> tuple[Metrics, int]:
    """Return the metrics, and the requests in flight when they were scraped. Raises ValueError, KeyError, TypeError or
    AttributeError."""
    age = values["age"]
    read = {name: _READERS[name](value) for name, value in values.items() if name in _READERS}
    return Metrics(**read, scraped_at=-math.inf if age is None else now - max(0.0, age)), int(values["in_flight"])


_DEFAULTS = {item.name: getattr(NEVER_SCRAPED, item.name) for item in dataclasses.fields(Metrics)}
del _DEFAULTS["scraped_at"]

_READERS_BY_TYPE: Mapping[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "Freshness": Freshness,
    "frozenset[str]": lambda names: frozenset(map(str, names)),
    "Mapping[str, float]": lambda found: {
        key: math.nan if value is None else float(value) for key, value in found.items()
    },
}
_READERS = {item.name: _READERS_BY_TYPE[str(item.type)] for item in dataclasses.fields(Metrics)}
del _READERS["scraped_at"]
