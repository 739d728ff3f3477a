"""A field of a form whose beginning has arrived: uploads are streamed, so the end may not be there yet."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^;\s]+))', re.IGNORECASE)
_NAME = re.compile(rb'content-disposition:[^\r\n]*[;\s]name="?([^";\r\n]+)"?', re.IGNORECASE)


def field(start: bytes, content_type: str, name: str) -> str | None:
    """The field's value; None if it is not among the parts that are complete in `start`."""
    boundary = _BOUNDARY.search(content_type)
    if not boundary:
        return None
    delimiter = b"--" + (boundary[1] or boundary[2]).encode()
    parts = (b"\r\n" + start).split(b"\r\n" + delimiter)
    for part in parts[1:-1]:
        head, _, value = part.partition(b"\r\n\r\n")
        found = _NAME.search(head)
        if found and found[1] == name.encode():
            return value.decode("utf-8", "replace").strip() or None
    return None
