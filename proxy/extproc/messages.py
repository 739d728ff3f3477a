"""The messages of ext_proc and of gRPC health checks, as far as they are used: names, numbers and types of fields.

Source: envoy/service/ext_proc/v3/external_processor.proto and envoy/config/core/v3/base.proto of Envoy,
grpc/health/v1/health.proto of gRPC, google/protobuf/struct.proto. A field that is not here is skipped by the parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from proxy.http.head import Pairs

PACKAGE = "kvlane.extproc"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""Values of ProcessingMode.BodySendMode."""

OVERWRITE = 2
"""Value of HeaderValueOption.HeaderAppendAction: OVERWRITE_IF_EXISTS_OR_ADD."""

SERVING, NOT_SERVING = 1, 2

# `*` is a list, `?` a member of a oneof. A map is a list of entries: its wire format is the same.
_FIELDS: Mapping[str, str] = {
    "ProcessingRequest": "2 request_headers ?HttpHeaders, 3 response_headers ?HttpHeaders, 4 request_body ?HttpBody,"
    " 5 response_body ?HttpBody, 6 request_trailers ?HttpTrailers, 7 response_trailers ?HttpTrailers,"
    " 8 metadata_context Metadata, 9 attributes *Field, 11 protocol_config ProtocolConfiguration",
    "ProtocolConfiguration": "1 request_body_mode int32, 2 response_body_mode int32",
    "HttpHeaders": "1 headers HeaderMap, 3 end_of_stream bool",
    "HttpBody": "1 body bytes, 2 end_of_stream bool",
    "HttpTrailers": "1 trailers HeaderMap",
    "HeaderMap": "1 headers *HeaderValue",
    "HeaderValue": "1 key string, 2 value string, 3 raw_value bytes",
    "Metadata": "1 filter_metadata *Field",
    "ProcessingResponse": "1 request_headers ?HeadersResponse, 2 response_headers ?HeadersResponse,"
    " 3 request_body ?BodyResponse, 4 response_body ?BodyResponse, 5 request_trailers ?TrailersResponse,"
    " 6 response_trailers ?TrailersResponse, 7 immediate_response ?ImmediateResponse, 8 dynamic_metadata Struct",
    "HeadersResponse": "1 response CommonResponse",
    "BodyResponse": "1 response CommonResponse",
    "TrailersResponse": "1 header_mutation HeaderMutation",
    "CommonResponse": "2 header_mutation HeaderMutation, 3 body_mutation BodyMutation, 5 clear_route_cache bool",
    "HeaderMutation": "1 set_headers *HeaderValueOption, 2 remove_headers *string",
    "HeaderValueOption": "1 header HeaderValue, 3 append_action int32",
    "BodyMutation": "1 body ?bytes, 2 clear_body ?bool, 3 streamed_response ?StreamedBodyResponse",
    "StreamedBodyResponse": "1 body bytes, 2 end_of_stream bool",
    "ImmediateResponse": "1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes, 5 details string",
    "HttpStatus": "1 code int32",
    "Struct": "1 fields *ValueField",
    "ValueField": "1 key string, 2 value Value",
    "Field": "1 key string, 2 value Struct",
    "Value": "2 number_value ?double, 3 string_value ?string, 4 bool_value ?bool, 5 struct_value ?Struct,"
    " 6 list_value ?ListValue",
    "ListValue": "1 values *Value",
    "HealthCheckRequest": "1 service string",
    "HealthCheckResponse": "1 status int32",
}

_TYPES = {
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "string": FieldDescriptorProto.TYPE_STRING,
}


def _message(name: str, fields: str) -> DescriptorProto:
    message = DescriptorProto(name=name)
    for each in fields.split(", "):
        number, label, kind = each.split()
        field = message.field.add(name=label, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
        if kind[0] == "*":
            field.label = FieldDescriptorProto.LABEL_REPEATED
        elif kind[0] == "?":
            field.oneof_index = 0
        kind = kind.lstrip("*?")
        field.type = _TYPES.get(kind, FieldDescriptorProto.TYPE_MESSAGE)
        if kind not in _TYPES:
            field.type_name = f".{PACKAGE}.{kind}"
    if "?" in fields:
        message.oneof_decl.add(name="kind")
    return message


def _classes() -> dict[str, Any]:
    pool = DescriptorPool()
    file = FileDescriptorProto(name="kvlane/extproc.proto", package=PACKAGE, syntax="proto3")
    file.message_type.extend(_message(*each) for each in _FIELDS.items())
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _FIELDS}


_CLASSES = _classes()
ProcessingRequest = _CLASSES["ProcessingRequest"]
ProcessingResponse = _CLASSES["ProcessingResponse"]
HealthCheckRequest = _CLASSES["HealthCheckRequest"]
HealthCheckResponse = _CLASSES["HealthCheckResponse"]


def plain(fields: Any) -> dict[str, Any]:
    """Return the values of metadata or attributes."""
    return {field.key: _plain(field.value) for field in fields}


def _plain(value: Any) -> Any:
    if value.DESCRIPTOR.name == "Struct":
        return plain(value.fields)
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(each) for each in value.list_value.values]
    if kind == "struct_value":
        return plain(value.struct_value.fields)
    return None if kind is None else getattr(value, kind)


DESTINATION = "x-gateway-destination-endpoint"
"""Header, and key of the metadata, for the addresses of the chosen pods."""
SERVED = "x-gateway-destination-endpoint-served"
NAMESPACE = "envoy.lb"

PIECE = 60 * 1024
"""Bytes of a body in one message; Envoy's documentation asks for no more than 64 KiB."""

WHOLE = (BUFFERED, BUFFERED_PARTIAL)


def go_on(kind: str) -> Any:
    """Return a reply that changes nothing."""
    reply = ProcessingResponse()
    getattr(reply, kind).SetInParent()
    return reply


def with_fields(kind: str, add: Pairs, remove: Iterable[str] = ()) -> Any:
    """Return a reply that changes header fields; `kind` is headers, or a buffered body."""
    reply = ProcessingResponse()
    common = getattr(reply, kind).response
    common.SetInParent()
    _change(common.header_mutation, add, remove)
    return reply


def with_destination(reply: Any, destination: str) -> None:
    """Set the destination as header and metadata, and clear the route cache: routes may depend on header fields."""
    getattr(reply, reply.WhichOneof("kind")).response.clear_route_cache = True
    balancer = reply.dynamic_metadata.fields.add(key=NAMESPACE).value.struct_value
    balancer.fields.add(key=DESTINATION).value.string_value = destination


def streamed(kind: str, body: bytes, last: bool) -> Iterator[Any]:
    """Yield a body, or a piece of one, in messages of limited size."""
    for start in range(0, len(body) or 1, PIECE):
        reply = ProcessingResponse()
        piece = getattr(reply, kind).response.body_mutation.streamed_response
        piece.body = body[start : start + PIECE]
        piece.end_of_stream = last and start + PIECE >= len(body)
        yield reply


def with_body(reply: Any, body: bytes) -> Any:
    """Replace the body of the message that this replies to."""
    change = getattr(reply, reply.WhichOneof("kind")).response.body_mutation
    if body:
        change.body = body
    else:
        change.clear_body = True
    return reply


def pieces_of(mode: int, body: bytes, last: bool, came: bytes) -> Iterator[Any]:
    """Yield the reply to a piece `came` of the pod's response; the client gets `body`."""
    if mode == FULL_DUPLEX_STREAMED:
        yield from streamed("response_body", body, last)
    elif body == came:
        yield go_on("response_body")
    else:
        yield with_body(go_on("response_body"), body)


def immediate(status: int, headers: Pairs, body: bytes) -> Any:
    """Return a reply with a response of kvlane itself."""
    reply = ProcessingResponse()
    response = reply.immediate_response
    response.status.code = status
    response.body = body
    response.details = "kvlane"
    _change(response.headers, headers, ())
    return reply


def _change(mutation: Any, add: Pairs, remove: Iterable[str]) -> None:
    for name, value in add:
        option = mutation.set_headers.add(append_action=OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("utf-8", "surrogateescape")
    mutation.remove_headers.extend(remove)


HEAD = 9
"""Bytes before the payload of a frame: its length in three, its type, its flags, its stream in four."""

GO_AWAY = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + b"\x7f\xff\xff\xff" + b"\x00\x00\x00\x00"
"""A GOAWAY frame: no new streams; open streams are served."""

_UNFINISHED = {1, 5, 9}
"""Types whose header block continues in the very next frame, unless a flag marks its end."""

_ENDS_HEADERS = 4


class GrpcFrames:
    """A tracker of frame boundaries in one direction of an HTTP/2 connection."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._is_between = False
        """False before the first frame: a connection starts with settings."""

    @property
    def is_between(self) -> bool:
        """Return whether all passed bytes are whole frames, so that another frame may follow."""
        return self._is_between and not self._left and not self._head

    def passed(self, data: bytes, stops: bool = False) -> int:
        """Return how many of these bytes have passed: all of them, or with `stops` the bytes up to the first frame
        boundary."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
            else:
                missing = HEAD - len(self._head)
                self._head += data[at : at + missing]
                at = min(at + missing, end)
                if len(self._head) == HEAD:
                    self._start()
            if stops and self.is_between:
                break
        return at

    def _start(self) -> None:
        head, self._head = self._head, b""
        self._left = int.from_bytes(head[:3])
        self._is_between = head[3] not in _UNFINISHED or bool(head[4] & _ENDS_HEADERS)
