"""A field of a form whose beginning has arrived: uploads are streamed, so the end may not be there yet."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^;\s]+))', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition:[^\r\n]*[;\s]name="?([^";\r\n]+)"?', re.IGNORECASE)


def field(start: bytes, content_type: str, name: str) -> str | None:
    """The field's value; None if it is not among the parts that are complete in `start`."""
    place = _place(start, content_type, name)
    return None if place is None else start[place[0] : place[1]].decode("utf-8", "replace").strip() or None


def with_field(start: bytes, content_type: str, name: str, value: str) -> bytes | None:
    """The same form with another value of the field, all other bytes as they are. None if `field` does not find it, or
    if the value could be taken for something else."""
    place = _place(start, content_type, name)
    if place is None or "\r" in value or "\n" in value:
        return None
    return b"".join((start[: place[0]], value.encode("utf-8", "surrogateescape"), start[place[1] :]))


def _place(start: bytes, content_type: str, name: str) -> tuple[int, int] | None:
    """Where the field's value begins and ends."""
    boundary = _BOUNDARY.search(content_type)
    if not boundary:
        return None
    delimiter = b"\r\n--" + (boundary[1] or boundary[2]).encode("utf-8", "surrogateescape")
    text = b"\r\n" + start
    at = text.find(delimiter)
    while at >= 0:
        begin = at + len(delimiter)
        at = text.find(delimiter, begin)
        head, blank, _ = text[begin:at].partition(b"\r\n\r\n") if at >= 0 else (b"", b"", b"")
        found = _NAME.search(head)
        if found and found[1] == name.encode():
            return begin + len(head) + len(blank) - 2, at - 2
    return None
