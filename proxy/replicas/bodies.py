"""Bodies of records and packets that are JSON, read into typed values. Every function raises Garbled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.replicas.wire import Garbled

_MOST = 0xFFFFFFFF
"""The largest address of a frame."""


def breaker(body: bytes) -> tuple[str, bool]:
    """Return a pod's name, and whether its breaker is open."""
    match _json(body):
        case [str(name), bool(is_open)]:
            return name, is_open
    raise Garbled("a breaker needs a pod and a state")


def pod(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise Garbled("the name of a pod is not UTF-8") from None


def bindings(body: bytes) -> Sequence[tuple[str, str]]:
    """Return pairs of a response id and the name of its pod."""
    found = []
    for entry in _list(body):
        match entry:
            case [str(response_id), str(name)]:
                found.append((response_id, name))
            case _:
                raise Garbled("a binding needs a response id and a pod")
    return found


def doubts(body: bytes) -> dict[str, list[str]]:
    """Return reasons by the name of the pod."""
    match _json(body):
        case dict(found) if all(isinstance(whys, list) and _are_texts(whys) for whys in found.values()):
            return found
    raise Garbled("doubts need a list of reasons for each pod")


def reloaded(body: bytes) -> tuple[int, bool]:
    """Return the number of settings, and whether the worker serves with them."""
    match _json(body):
        case [int(number), bool(is_good)]:
            return number, is_good
    raise Garbled("a reload needs a number and a result")


def number(body: bytes) -> int:
    match _json(body):
        case int(found):
            return found
    raise Garbled("a round of reads needs a number")


def numbers(body: bytes) -> dict[int, int]:
    """Return numbers by worker."""
    found = {}
    for entry in _list(body):
        match entry:
            case [int(worker), int(number)]:
                found[worker] = number
            case _:
                raise Garbled("the end of a round needs a worker and a number")
    return found


def hosts(body: bytes) -> tuple[int, int, bool]:
    """Return the number of hosts, the rank of this one, and whether the others can be reached."""
    match _json(body):
        case [int(number), int(rank), bool(are_heard)] if 0 <= rank < number:
            return number, rank, are_heard
    raise Garbled("hosts need a number and a rank below it")


def snapshot(body: bytes) -> tuple[int, float]:
    """Return the address that asks, and which part of what is remembered it wants."""
    match _json(body):
        case {"to": int(to), "memory": int() | float() as memory} if 0 <= to <= _MOST and 0.0 <= memory <= 1.0:
            return to, float(memory)
    raise Garbled("a snapshot needs an address and a share")


def facts(body: bytes) -> tuple[str, str, Sequence[int]]:
    """Return a host's name, its configuration and its members."""
    match _json(body):
        case {"name": str(name), "config": str(config), "members": list(members)} if all(map(_is_address, members)):
            return name, config, members
    raise Garbled("a host needs a name, a configuration and its members")


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except ValueError:
        raise Garbled("a body is not JSON") from None


def _list(body: bytes) -> list[Any]:
    found = _json(body)
    if not isinstance(found, list):
        raise Garbled("a body is not a list")
    return found


def _are_texts(items: Sequence[Any]) -> bool:
    return all(isinstance(item, str) for item in items)


def _is_address(item: Any) -> bool:
    return type(item) is int and 0 <= item <= _MOST
