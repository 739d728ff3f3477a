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
from proxy.kubernetes.settings import ApiServer

log = logging.getLogger(__name__)


Object = Mapping[str, Any]
"""As the server writes it."""

GONE = 410
"""Status of a watch from a version that the server has forgotten."""

PAGE = 500
"""Objects per page of a list."""

TIMEOUT = 10.0
"""Seconds for one response of the API server."""

WATCH = 300.0
"""Seconds after which the API server ends a watch; a watch that is silent for `TIMEOUT` longer is closed."""


def text(fields: Object, name: str) -> str:
    """Return a field, empty where it is missing. Raise TypeError if it is not a text."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r:.80}, not a text")
    return value


def texts(fields: Object, name: str) -> dict[str, str]:
    """Return a map of texts, empty where it is missing. Raise TypeError if it is something else."""
    values = fields.get(name) or {}
    return {key: text(values, key) for key in values}


class ApiError(Exception):
    """A failed request. `status` is that of the response, or of the error in a watch; 0 without a response."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects; the core group is empty."""

    group: str
    version: str
    name: str

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        return f"{root}/namespaces/{namespace}/{self.name}"

    def __str__(self) -> str:
        return f"{self.name}.{self.group}" if self.group else self.name


class ListedObjects(NamedTuple):
    """A list; `version` is where a watch continues."""

    items: list[Object]
    version: str


class WatchEvent(NamedTuple):
    kind: str
    object: Object


class Api:
    """Requests to the API server, each with the current token and certificates. All methods raise ApiError."""

    def __init__(self, access: ApiServer, timeout: float = TIMEOUT, watch: float = WATCH) -> None:
        self._access = access
        self._timeout = timeout
        self._watch = watch

    async def list(self, resource: Resource, query: Mapping[str, str]) -> ListedObjects:
        """Return all objects, page by page. Raise ApiError with GONE where the list has expired in between."""
        items: list[Object] = []
        page = ""
        async with await self._session() as session:
            path = resource.path(await self._namespace())
            while True:
                parameters = {**query, "limit": str(PAGE), **({"continue": page} if page else {})}
                listed = await self._page(session, path, parameters)
                items += listed.get("items") or ()
                page = listed["metadata"].get("continue") or ""
                if not page:
                    return ListedObjects(items, listed["metadata"]["resourceVersion"])

    async def watch(self, resource: Resource, query: Mapping[str, str], version: str) -> AsyncIterator[WatchEvent]:
        """Yield the events after `version` until the server ends the watch. Raise an error that it reports."""
        parameters = {
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
                    response = await session.get(self._access.url + path, params=parameters)
                async with response:
                    if response.status != 200:
                        raise _refusal(response.status, await outbound.read(response))
                    async for line in _lines(response.content):
                        yield _event(line)
            except outbound.FAILURES as error:
                raise ApiError(0, _why(error)) from None

    async def _page(self, session: aiohttp.ClientSession, path: str, parameters: Mapping[str, str]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout):
                response = await outbound.send(session, "GET", self._access.url + path, params=parameters)
        except outbound.FAILURES as error:
            raise ApiError(0, _why(error)) from None
        if response.status != 200:
            raise _refusal(response.status, response.body)
        listed = _parsed(response.body)
        match listed:
            case {"metadata": {"resourceVersion": str()} as metadata} if isinstance(listed.get("items") or [], list):
                if isinstance(metadata.get("continue") or "", str):
                    return listed
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
            raise ApiError(0, f"set a namespace: there is no service account of a pod ({error.strerror})") from None


async def open_session(access: ApiServer, timeout: float | None, silence: float | None = None) -> aiohttp.ClientSession:
    """Return a session with the token and certificates of now; see `outbound.session`. Raise OSError or ValueError for
    files that cannot be used."""
    headers, tls = await asyncio.to_thread(lambda: (access.headers(), access.trust()))
    return outbound.session(timeout, headers=headers, tls=tls, silence=silence)


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length: an object may be larger than the stream's own reader allows."""
    held = b""
    async for chunk in stream.iter_any():
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield line


def _event(line: bytes) -> WatchEvent:
    event = _parsed(line)
    kind, item = event.get("type"), event.get("object")
    if not isinstance(kind, str) or not isinstance(item, dict):
        raise ApiError(0, "a line of the watch is not an event")
    if kind == "ERROR":
        code = item.get("code")
        raise ApiError(code if isinstance(code, int) else 0, str(item.get("message") or "the watch failed"))
    return WatchEvent(kind, item)


def _refusal(status: int, body: bytes) -> ApiError:
    """Return an error with the server's message, which names the missing permission."""
    try:
        message = _parsed(body).get("message")
    except ApiError:
        message = None
    return ApiError(status, f"{status} {message or body[:200].decode(errors='replace').strip()}".strip())


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except ValueError:
        raise ApiError(0, "the server's response is not JSON") from None
    if not isinstance(value, dict):
        raise ApiError(0, "the server's response is not a JSON object")
    return value


def _why(error: BaseException) -> str:
    return str(error) or ("no response in time" if isinstance(error, TimeoutError) else type(error).__name__)


T = TypeVar("T")

RETRY = 0.5
"""Seconds between two watches; doubled with every failure."""

_LONGEST = 32
"""Largest factor of the first pause."""

_PATIENCE = 3
"""Consecutive failures after which everything is listed again."""

_UNAUTHORIZED, _FORBIDDEN, _UNKNOWN, _TOO_MANY = 401, 403, 404, 429


@dataclass(eq=False)
class Collection(Generic[T]):
    """The objects of one kind by name, each converted by `read`. They stay unchanged while the server is unreachable.

    `run` calls `changed` whenever an object changes, after the first response and after the first failure; `listed`
    tells the two apart.
    """

    _api: Api
    _resource: Resource
    _query: Mapping[str, str]
    """labelSelector and fieldSelector."""
    _read: Callable[[Object], T]
    _changed: Callable[[], None]
    _clock: Clock
    _random: Random
    _retry: float = RETRY

    def __post_init__(self) -> None:
        self._version: str | None = None
        """Where a watch continues; None: list everything first."""
        self._failures = 0
        self._warned = ""
        self._unreadable: dict[str, str] = {}
        """The last error of reading each object."""
        self._skipped = False
        """Whether an object without a name was logged since the last list."""
        self.objects: dict[str, T] = {}
        self.listed = False

    async def run(self) -> None:
        while True:
            began = self._clock.now()
            try:
                if self._version is None:
                    await self._list()
                    began = self._clock.now()
                await self._watch(self._version or "")
            except ApiError as error:
                self._on_error(error)
            if self._clock.now() - began > _LONGEST * self._retry:
                self._failures = 0
            await asyncio.sleep(self._pause())

    async def _list(self) -> None:
        listed = await self._api.list(self._resource, self._query)
        objects: dict[str, T] = {}
        self._skipped = False
        for item in listed.items:
            if (name := self._name(item)) is not None:
                self._put(objects, name, item)
        self._unreadable = {name: why for name, why in self._unreadable.items() if name in objects}
        self._version = listed.version
        self._recovered()
        if objects != self.objects or not self.listed:
            self.objects, self.listed = objects, True
            self._changed()

    async def _watch(self, version: str) -> None:
        async with aclosing(self._api.watch(self._resource, self._query, version)) as events:  # type: ignore[type-var]
            async for event in events:
                try:
                    version = str(event.object["metadata"]["resourceVersion"])
                except (KeyError, TypeError):
                    raise ApiError(0, "the object of an event has no version") from None
                if event.kind in ("ADDED", "MODIFIED", "DELETED"):
                    self._store(event)
                self._version = version  # all that bookmarks change
                self._failures = 0
                self._recovered()

    def _store(self, event: WatchEvent) -> None:
        if (name := self._name(event.object)) is None:
            return
        before = self.objects.get(name)
        if event.kind == "DELETED":
            self.objects.pop(name, None)
            self._unreadable.pop(name, None)
        else:
            self._put(self.objects, name, event.object)
        if self.objects.get(name) != before:
            self._changed()

    def _put(self, objects: dict[str, T], name: str, item: Object) -> None:
        """Store an object. One that cannot be read is left out, or keeps its last value."""
        try:
            objects[name] = self._read(item)
            self._unreadable.pop(name, None)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if self._unreadable.get(name) != repr(error):
                log.warning("failed to read %s %s; keeping its last value: %r", self._resource, name, error)
            self._unreadable[name] = repr(error)
            if name in self.objects:
                objects[name] = self.objects[name]

    def _name(self, item: Any) -> str | None:
        """Return the name, or None for an object that has none, which is skipped; the first one is logged."""
        try:
            name = item["metadata"]["name"]
        except (LookupError, TypeError):
            name = None
        if isinstance(name, str) and name:
            return name
        if not self._skipped:
            log.warning("skipping an object of %s: its metadata.name is %r, not a text", self._resource, name)
        self._skipped = True
        return None

    def _on_error(self, error: ApiError) -> None:
        """A lost connection continues at the same version, without a warning the first time. Where the server has
        forgotten the version, or refuses the watch, everything is listed again."""
        if (0 < error.status < 500 and error.status != _TOO_MANY) or self._failures >= _PATIENCE:
            self._version = None
        if error.status != GONE and (error.status or self._failures or not self.listed):
            self._warn_once(error)
        if not self.listed and not self._failures:
            self._changed()
        self._failures += 1

    def _warn_once(self, error: ApiError) -> None:
        reason = f"{error.status or error}"
        if reason != self._warned:
            log.warning("failed to watch %s; keeping known objects: %s%s", self._resource, error, self._advice(error))
        self._warned = reason

    def _advice(self, error: ApiError) -> str:
        group, name = self._resource.group, self._resource.name
        if error.status == _FORBIDDEN:
            rule = f'{{apiGroups: ["{group}"], resources: ["{name}"], verbs: [list, watch]}}'
            return f"; the service account needs a Role with the rule {rule}"
        if error.status == _UNAUTHORIZED:
            return "; the token is not valid"
        if error.status == _UNKNOWN:
            return f"; the server does not know {self._resource}: install its CRDs, version {self._resource.version}"
        return ""

    def _recovered(self) -> None:
        if self._warned:
            log.info("watching %s again", self._resource)
        self._warned = ""

    def _pause(self) -> float:
        """Return the seconds until the next watch: `retry` after a regular end, plus or minus a quarter."""
        longer = min(1 << min(self._failures, 16), _LONGEST)
        return self._retry * longer * (0.75 + 0.5 * self._random.random())
