"""Lists and watches of the API server, over plain HTTP: https://kubernetes.io/docs/reference/using-api/api-concepts/."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp
import orjson

from proxy import outbound
from proxy.kubernetes.access import Access

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
