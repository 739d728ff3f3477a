"""The API of Kubernetes over plain HTTP: lists, watches and the objects that they keep.

See https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import aiohttp
import orjson

from proxy import outbound
from proxy.core.ports import Clock, Random
from proxy.kubernetes.settings import Access

Object = Mapping[str, Any]
"""As the server writes it."""

GONE = 410
"""What was asked for is older than all that the server remembers."""

PAGE = 500
"""Objects in one answer to a list."""

TIMEOUT = 10.0
"""Seconds for one response of the API server."""

WATCH = 300.0
"""Seconds after which the API server ends a watch; a watch that is silent for `TIMEOUT` longer is closed."""


class ApiError(Exception):
    """`status` is that of the answer, or of the error in a watch; 0 where there was none."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects; the `group` of those of the core is empty."""

    group: str
    version: str
    name: str

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.name}"

    def __str__(self) -> str:
        return f"{self.name}.{self.group}" if self.group else self.name


class Listed(NamedTuple):
    """`version` is where a watch goes on."""

    items: list[Object]
    version: str


class Event(NamedTuple):
    kind: str
    object: Object


class Api:
    """Each connection is made with the token and certificates that are there by then. All methods raise ApiError."""

    def __init__(self, access: Access, timeout: float = TIMEOUT, watch: float = WATCH) -> None:
        self._access = access
        self._timeout = timeout
        self._watch = watch

    async def list(self, resource: Resource, query: Mapping[str, str]) -> Listed:
        """Page by page. Where the server has forgotten the list in between, it raises GONE."""
        items: list[Object] = []
        page = ""
        async with await self._session() as session:
            path = resource.path(await self._namespace())
            while True:
                asked = {**query, "limit": str(PAGE), **({"continue": page} if page else {})}
                said = await self._page(session, path, asked)
                items += said.get("items") or ()
                page = said["metadata"].get("continue") or ""
                if not page:
                    return Listed(items, said["metadata"]["resourceVersion"])

    async def watch(self, resource: Resource, query: Mapping[str, str], version: str) -> AsyncIterator[Event]:
        """What happens after `version`, until the server ends it. An error that it tells is raised."""
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(int(self._watch), 1)),
        }
        async with await self._session(self._watch + self._timeout) as session:
            path = resource.path(await self._namespace())
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await session.get(self._access.url + path, params=asked)
                async with answer:
                    if answer.status != 200:
                        raise _refusal(answer.status, await outbound.read(answer))
                    async for line in _lines(answer.content):
                        yield _event(line)
            except outbound.FAILURES as error:
                raise ApiError(0, _why(error)) from None

    async def _page(self, session: aiohttp.ClientSession, path: str, asked: Mapping[str, str]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout):
                answer = await outbound.send(session, "GET", self._access.url + path, params=asked)
        except outbound.FAILURES as error:
            raise ApiError(0, _why(error)) from None
        if answer.status != 200:
            raise _refusal(answer.status, answer.body)
        said = _parsed(answer.body)
        match said:
            case {"metadata": {"resourceVersion": str()} as metadata} if isinstance(said.get("items") or [], list):
                if isinstance(metadata.get("continue") or "", str):
                    return said
        raise ApiError(0, "the server's response is not a list of objects")

    async def _session(self, silence: float | None = None) -> aiohttp.ClientSession:
        """`silence`: seconds without a byte after which a connection is given up."""
        try:
            return await open_session(self._access, None, silence)
        except (OSError, ValueError) as error:
            raise ApiError(0, _why(error)) from None

    async def _namespace(self) -> str:
        try:
            return await asyncio.to_thread(self._access.own_namespace)
        except OSError as error:
            raise ApiError(0, f"no namespace is given, and there is none of a pod: {error.strerror}") from None


async def open_session(access: Access, timeout: float | None, silence: float | None = None) -> aiohttp.ClientSession:
    """Return a session with the token and certificates of now; see `outbound.session`. Raise OSError or ValueError for
    files that cannot be used."""
    headers, tls = await asyncio.to_thread(lambda: (access.headers(), access.trust()))
    return outbound.session(timeout, headers=headers, tls=tls, silence=silence)


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """However long: an object may have a megabyte, and the stream's own reader stops far below that."""
    held = b""
    async for chunk in stream.iter_any():
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line


def _event(line: bytes) -> Event:
    said = _parsed(line)
    kind, told = said.get("type"), said.get("object")
    if not isinstance(kind, str) or not isinstance(told, dict):
        raise ApiError(0, "a line of the watch is no event")
    if kind == "ERROR":
        code = told.get("code")
        raise ApiError(code if isinstance(code, int) else 0, str(told.get("message") or "the watch failed"))
    return Event(kind, told)


def _refusal(status: int, body: bytes) -> ApiError:
    """With the server's own words: they name who may not do what."""
    try:
        message = _parsed(body).get("message")
    except ApiError:
        message = None
    return ApiError(status, f"{status} {message or body[:200].decode(errors='replace').strip()}".strip())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(text)
    except ValueError:
        raise ApiError(0, "what the server says is no JSON") from None
    if not isinstance(said, dict):
        raise ApiError(0, "what the server says is no object")
    return said


def _why(error: BaseException) -> str:
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


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
