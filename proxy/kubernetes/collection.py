"""The objects of one kind, as the server has them: listed once, and followed by watches from there on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Generic, TypeVar

from proxy.core.ports import Clock, Random
from proxy.kubernetes.api import GONE, Api, ApiError, Event, Object, Resource

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY = 0.5
"""Seconds between two watches; the pause doubles with every failure."""

_LONGEST = 32
"""Pauses grow up to so many times the first one."""

_PATIENCE = 3
"""Failures one after the other, after which not even the version that a watch would go on from is believed."""

_UNAUTHORIZED, _FORBIDDEN, _UNKNOWN, _TOO_MANY = 401, 403, 404, 429


class Collection(Generic[T]):
    """`objects` by name, each as `read` gives it. They stay as they are while the server cannot be asked.

    `run` goes on until it is cancelled, and calls `changed` whenever an object is another one, and after the first
    answer, and the first failure: `listed` says which it was.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        query: Mapping[str, str],
        read: Callable[[Object], T],
        changed: Callable[[], None],
        clock: Clock,
        rng: Random,
        retry: float = RETRY,
    ) -> None:
        """`query`: labelSelector and fieldSelector, if any; `retry`: seconds between two watches."""
        self._api = api
        self._resource = resource
        self._query = query
        self._read = read
        self._changed = changed
        self._retry = retry
        self._clock = clock
        self._random = rng
        self._version: str | None = None
        """From where a watch goes on; None: it has to be listed."""
        self._failures = 0
        self._said = ""
        self.objects: dict[str, T] = {}
        self.listed = False

    async def run(self) -> None:
        while True:
            began = self._clock.now()
            try:
                if self._version is None:
                    await self._list()
                    began = self._clock.now()
                await self._follow(self._version or "")
            except ApiError as error:
                self._on_error(error)
            if self._clock.now() - began > _LONGEST * self._retry:
                self._failures = 0
            await asyncio.sleep(self._pause())

    async def _list(self) -> None:
        listed = await self._api.list(self._resource, self._query)
        objects: dict[str, T] = {}
        try:
            for item in listed.items:
                self._put(objects, item)
        except (KeyError, TypeError):
            raise ApiError(0, "an object of the list has no name") from None
        self._version = listed.version
        self._recovered()
        if objects != self.objects or not self.listed:
            self.objects, self.listed = objects, True
            self._changed()

    async def _follow(self, version: str) -> None:
        async with aclosing(self._api.watch(self._resource, self._query, version)) as events:  # type: ignore[type-var]
            async for event in events:
                self._take(event)
                self._failures = 0
                self._recovered()

    def _take(self, event: Event) -> None:
        """Bookmarks only say how far the watch has come."""
        try:
            version = str(event.object["metadata"]["resourceVersion"])
            if event.kind in ("ADDED", "MODIFIED", "DELETED"):
                self._apply(event)
            self._version = version
        except (KeyError, TypeError):
            raise ApiError(0, "the object of an event has no name or no version") from None

    def _apply(self, event: Event) -> None:
        name = event.object["metadata"]["name"]
        before = self.objects.get(name)
        if event.kind == "DELETED":
            self.objects.pop(name, None)
        else:
            self._put(self.objects, event.object)
        if self.objects.get(name) != before:
            self._changed()

    def _put(self, objects: dict[str, T], item: Object) -> None:
        """What cannot be read is left out, or left as it was."""
        name = item["metadata"]["name"]
        try:
            objects[name] = self._read(item)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            log.warning("%s %s cannot be read: %r", self._resource, name, error)
            if name in self.objects:
                objects[name] = self.objects[name]

    def _on_error(self, error: ApiError) -> None:
        """What is lost, or comes too early, goes on where it was, and once is nothing worth a word. Where the server
        does not remember that any more, or refuses to, events are missing, and all is listed again."""
        if (0 < error.status < 500 and error.status != _TOO_MANY) or self._failures >= _PATIENCE:
            self._version = None
        if error.status != GONE and (error.status or self._failures or not self.listed):
            self._warn_once(error)
        if not self.listed and not self._failures:
            self._changed()
        self._failures += 1

    def _warn_once(self, error: ApiError) -> None:
        said = f"{error.status or error}"
        if said != self._said:
            log.warning("%s cannot be followed, all stays as it is: %s%s", self._resource, error, self._advice(error))
        self._said = said

    def _advice(self, error: ApiError) -> str:
        group, name = self._resource.group, self._resource.name
        if error.status == _FORBIDDEN:
            rule = f'{{apiGroups: ["{group}"], resources: ["{name}"], verbs: [list, watch]}}'
            return f"; the service account needs a Role with the rule {rule}"
        if error.status == _UNAUTHORIZED:
            return "; the token is not valid"
        if error.status == _UNKNOWN:
            return f"; the server knows no {self._resource}: are its CRDs of {self._resource.version} installed?"
        return ""

    def _recovered(self) -> None:
        if self._said:
            log.info("%s can be followed again", self._resource)
        self._said = ""

    def _pause(self) -> float:
        """A watch that ends in peace is followed by the next one after `retry`, give or take a quarter."""
        longer = min(1 << min(self._failures, 16), _LONGEST)
        return self._retry * longer * (0.75 + 0.5 * self._random.random())
