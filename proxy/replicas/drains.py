"""Which pods operators drain, known to all hosts: of two who disagree, the one who was told later is right."""

from __future__ import annotations

from collections.abc import Callable

import orjson

from proxy.core.endpoint import Endpoint
from proxy.replicas.wire import Garbled

Set = Callable[[str, bool], None]


class SharedDrains:
    """Later is who knew of more changes of the pod before, so no two clocks are compared; of two who knew of the same,
    the one that drains it.

    `set(pod, drains)` is called for what others did, and for a pod that comes of which they said it; it raises
    KeyError for a pod that is not there. `tell` gets the body of DRAINS for what was done here.
    """

    def __init__(self, set_: Set, tell: Callable[[bytes], None]) -> None:
        self._set = set_
        self._tell = tell
        self._known: dict[str, tuple[int, bool]] = {}
        """How many changes there were, and what the last one made of it."""

    def turned(self, endpoint: Endpoint, drains: bool) -> None:
        """It is so here from now on."""
        changes, known = self._known.get(endpoint.name, (0, False))
        if known is not drains:
            self._known[endpoint.name] = changes + 1, drains
            self._tell(orjson.dumps([(endpoint.name, changes + 1, drains)]))

    def take(self, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        for name, changes, drains in _said(body):
            if (changes, drains) > self._known.get(name, (0, False)):
                self._known[name] = changes, drains
                self._apply(name, drains)

    def all(self) -> bytes:
        """Body of DRAINS."""
        return orjson.dumps([(name, *known) for name, known in self._known.items()])

    def added(self, endpoint: Endpoint) -> None:
        if self._known.get(endpoint.name, (0, False))[1]:
            self._apply(endpoint.name, True)

    def removed(self, endpoint: Endpoint) -> None:
        """Everybody sees it go: the next one of its name is another pod."""
        changes, drains = self._known.get(endpoint.name, (0, False))
        if drains:
            self._known[endpoint.name] = changes + 1, False

    def _apply(self, name: str, drains: bool) -> None:
        try:
            self._set(name, drains)
        except KeyError:
            return  # it is not there yet: `added` sees to it


def _said(body: bytes) -> list[tuple[str, int, bool]]:
    try:
        return [(str(name), int(changes), bool(drains)) for name, changes, drains in orjson.loads(body)]
    except (ValueError, TypeError, OverflowError):
        raise Garbled("drains that are none") from None
