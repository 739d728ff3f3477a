"""What is said to a gateway, as messages: pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from proxy.extproc.messages import BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED, OVERWRITE, ProcessingResponse
from proxy.http.head import Pairs

DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, by which a gateway is told where a request goes."""
SERVED = "x-gateway-destination-endpoint-served"
NAMESPACE = "envoy.lb"

PIECE = 60 * 1024
"""Bytes of a body in one message; Envoy's documentation asks for no more than 64 KiB."""

WHOLE = (BUFFERED, BUFFERED_PARTIAL)


def go_on(kind: str) -> Any:
    """With the message of this kind, as it is."""
    reply = ProcessingResponse()
    getattr(reply, kind).SetInParent()
    return reply


def with_fields(kind: str, add: Pairs, remove: Iterable[str] = ()) -> Any:
    """With other header fields; `kind` is headers, or a body that came whole."""
    reply = ProcessingResponse()
    common = getattr(reply, kind).response
    common.SetInParent()
    _change(common.header_mutation, add, remove)
    return reply


def with_destination(reply: Any, destination: str) -> None:
    """By both of the ways that there are, and to a route that is looked for anew: it may depend on the fields."""
    getattr(reply, reply.WhichOneof("kind")).response.clear_route_cache = True
    balancer = reply.dynamic_metadata.fields.add(key=NAMESPACE).value.struct_value
    balancer.fields.add(key=DESTINATION).value.string_value = destination


def streamed(kind: str, body: bytes, last: bool) -> Iterator[Any]:
    """A body, or a piece of one, in as many messages as it takes."""
    for start in range(0, len(body) or 1, PIECE):
        reply = ProcessingResponse()
        piece = getattr(reply, kind).response.body_mutation.streamed_response
        piece.body = body[start : start + PIECE]
        piece.end_of_stream = last and start + PIECE >= len(body)
        yield reply


def with_body(reply: Any, body: bytes) -> Any:
    """In place of the one that came with the message that this replies to."""
    change = getattr(reply, reply.WhichOneof("kind")).response.body_mutation
    if body:
        change.body = body
    else:
        change.clear_body = True
    return reply


def pieces_of(mode: int, body: bytes, last: bool, came: bytes) -> Iterator[Any]:
    """The reply to a piece of the pod's answer that `came`, of which this `body` is to reach the client."""
    if mode == FULL_DUPLEX_STREAMED:
        yield from streamed("response_body", body, last)
    elif body == came:
        yield go_on("response_body")
    else:
        yield with_body(go_on("response_body"), body)


def immediate(status: int, headers: Pairs, body: bytes) -> Any:
    """An answer of our own."""
    reply = ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = "kvlane"
    _change(answer.headers, headers, ())
    return reply


def _change(mutation: Any, add: Pairs, remove: Iterable[str]) -> None:
    for name, value in add:
        option = mutation.set_headers.add(append_action=OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("utf-8", "surrogateescape")
    mutation.remove_headers.extend(remove)
