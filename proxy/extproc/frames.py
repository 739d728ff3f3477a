"""Where a stream of HTTP/2 frames may be told something between two of them (RFC 9113, sections 4.1, 6.2, 6.8)."""

from __future__ import annotations

HEAD = 9
"""Bytes before the payload of a frame: its length in three, its type, its flags, its stream in four."""

GO_AWAY = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + b"\x7f\xff\xff\xff" + b"\x00\x00\x00\x00"
"""No new streams here, please; whatever stream was opened by now is served, and nothing is wrong."""

_UNFINISHED = {1, 5, 9}
"""Types whose header block goes on in the next frame, which must be the very next, unless a flag says that it ends."""

_ENDS_HEADERS = 4


class Frames:
    """Of one direction of a connection, as its bytes go by."""

    __slots__ = ("_head", "_is_between", "_left")

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._is_between = False
        """Not before the first frame: a connection begins with settings."""

    @property
    def is_between(self) -> bool:
        """Whether all that went by were whole frames, and another one may follow."""
        return self._is_between and not self._left and not self._head

    def passed(self, data: bytes, stops: bool = False) -> int:
        """How many of these bytes have gone by: all of them, or with `stops` those up to the first place between."""
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
                    self._begin()
            if stops and self.is_between:
                break
        return at

    def _begin(self) -> None:
        head, self._head = self._head, b""
        self._left = int.from_bytes(head[:3])
        self._is_between = head[3] not in _UNFINISHED or bool(head[4] & _ENDS_HEADERS)
