"""Why a client's connection is ended that brought no request to be served, or not the whole of one."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from proxy.core.errors import BodyTimeout, HeadTimeout, HeadTooLarge, NoHttp, RequestError


class HungUp(Enum):
    MAX_CONNECTIONS = "max-connections"
    OUT_OF_FILES = "out-of-files"
    TLS_HANDSHAKE = "tls-handshake"
    HEAD_TIMEOUT = "head-timeout"
    BODY_TIMEOUT = "body-timeout"
    SEND_TIMEOUT = "send-timeout"
    BAD_REQUEST = "bad-request"


Tell = Callable[[HungUp, int], None]
"""Why, and on how many."""

_AFTER = {
    HeadTimeout: HungUp.HEAD_TIMEOUT,
    BodyTimeout: HungUp.BODY_TIMEOUT,
    NoHttp: HungUp.BAD_REQUEST,
    HeadTooLarge: HungUp.BAD_REQUEST,
}


def after(refusal: RequestError) -> HungUp | None:
    """None for what leaves its connection as it is."""
    return _AFTER.get(type(refusal))


def untold(why: HungUp, number: int) -> None:
    """For those that nobody counts."""
