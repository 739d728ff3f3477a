"""A client that shows what arrives, and when."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """`first_byte` is the number of seconds from sending to the first byte of the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    first_byte: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def pod(self) -> str:
        """The pod that the proxy chose."""
        return self.headers["x-kvlane-endpoint"]


class Pending:
    """A request that was sent and whose response has not been read."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._response: http.client.HTTPResponse | None = None

    @property
    def pod(self) -> str:
        """The pod that the proxy chose; waits for the head of the response."""
        return str(self._begun().getheader("x-kvlane-endpoint"))

    def read(self, size: int) -> bytes:
        """Waits for so many bytes of the body."""
        return self._begun().read(size)

    def read_all(self) -> bytes:
        """Up to the end, whether it is a good one or not."""
        try:
            return self._begun().read()
        except http.client.IncompleteRead as cut:
            return cut.partial

    def _begun(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response

    def hang_up(self) -> float:
        """The time at which the client has left."""
        if self._response is not None:
            self._response.close()
        self._connection.close()
        return time.monotonic()


class Client:
    """One server; every request on a connection of its own, unless sent by `several`."""

    def __init__(self, host: str) -> None:
        self.host = host

    def get(self, path: str) -> EngineResponse:
        return self._ask("GET", path, None, {})

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> EngineResponse:
        """`body` is sent as JSON, or as it is if it is bytes."""
        return self._ask("POST", path, body, headers or {})

    def seconds_each(self, path: str, body: Any, count: int) -> list[float]:
        """How long each of `count` requests took, one after the other on one connection."""
        with self._connected() as connection:
            return [_attempt(connection, "POST", path, body, {})[1] for _ in range(count)]

    @contextmanager
    def pending(self, path: str, body: Any) -> Iterator[Pending]:
        with self._connected() as connection:
            _send(connection, "POST", path, body, {})
            yield Pending(connection)

    def up(self) -> bool:
        try:
            return self.get("/health").status == 200
        except OSError:
            return False

    def _ask(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> EngineResponse:
        with self._connected() as connection:
            return _attempt(connection, method, path, body, headers)[0]

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self.host, timeout=TIMEOUT)
        try:
            yield connection
        finally:
            connection.close()


def _attempt(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Mapping[str, str]
) -> tuple[EngineResponse, float]:
    started = time.perf_counter()
    _send(connection, method, path, body, headers)
    response = read_response(connection.getresponse(), started)
    return response, time.perf_counter() - started


def read_response(response: http.client.HTTPResponse, started: float) -> EngineResponse:
    first = response.read(1)
    first_byte = time.perf_counter() - started
    content = first + response.read()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return EngineResponse(response.status, headers, content, first_byte)


def _send(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Mapping[str, str]
) -> None:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, content, {"Content-Type": "application/json", **headers})
