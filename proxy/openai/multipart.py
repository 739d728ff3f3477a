"""The `model` field of a multipart form, read as the engines' form parsers read it (Starlette with python-multipart).

A form that two parsers could read in different ways is refused, because a key may be allowed one of the models only.
"""

from __future__ import annotations

import re

from proxy.core.errors import BadRequest

MOST_PARTS = 256
"""Parts of a form. The longest request that engines take has about 40; each part costs about 5 us."""

LONGEST_HEAD = 8 * 1024
"""Bytes of the header block of a part."""

MOST_LINES = 16
"""Lines of the header block of a part. Clients send up to four, and engines take eight."""

LONGEST_MODEL = 8 * 1024
"""Bytes of the value of the model field."""

STEP = 256 * 1024
"""Bytes that are searched at once, in 0.1 ms."""

_CONTENT_TYPE = re.compile(
    rb'(?i)multipart/form-data((?:[ \t]*;[ \t]*[a-z0-9-]+=(?:"[!#-:<-\[\]-~]*"|[!#-+\--:=?-\[\]-~]+))+)[ \t]*;?'
)
_PARAMETER = re.compile(rb';[ \t]*([A-Za-z0-9-]+)=(?:"([^"]*)"|([^;" \t]+))')
_BOUNDARY = re.compile(rb"[!#-:<-\[\]-~]{1,200}")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
_DISPOSITION = re.compile(rb'(?i)form-data((?:[ \t]*;[ \t]*[a-z-]+\*?=(?:"[^"]*"|[!#-+\--:?-\[\]-~]+)){1,8})[ \t]*;?')
_OPTION = re.compile(rb';[ \t]*([A-Za-z-]+\*?)=("[^"]*"|[^\s";\\]+)')
_UNCODED = (b"7bit", b"8bit", b"binary")
_CHARSET = re.compile(rb'(?i)[^;]*;[ \t]*charset="?(?:(utf-8)|us-ascii|iso-8859-1)"?')
"""Charsets whose bytes equal UTF-8 for this text: UTF-8, or another one if the text is ASCII."""


class Form:
    """Reads a form piece by piece. `model` is the value of the field, None if it is missing or empty; `place` is
    where the value begins and ends, counted from the start of the form."""

    def __init__(self, content_type: str) -> None:
        self._delimiter = b"\r\n--" + _boundary(content_type)
        self._buffer = b""
        self._at = 0
        """Number of parsed bytes of the buffer."""
        self._offset = 0
        """Position of the buffer in the form."""
        self._read_on = self._start
        self._encoding = ""
        """Encoding of the value of the model field."""
        self._parts = 0
        self._ended = False
        self.model: str | None = None
        self.place: tuple[int, int] | None = None

    def feed(self, data: bytes) -> None:
        """Parse a piece. Raise BadRequest."""
        for start in range(0, len(data), STEP):
            if self._ended:  # what follows the last boundary means nothing
                return
            self._buffer = self._buffer[self._at :] + data[start : start + STEP]
            self._offset += self._at
            self._at = 0
            while self._read_on():
                pass

    def finish(self) -> None:
        """End the form. Raise BadRequest if it is incomplete."""
        if not self._ended:
            raise _unreadable("its last boundary is missing")

    # Each of these reads one thing, and returns False if it needs more bytes, or if nothing follows.

    def _start(self) -> bool:
        while self._offset + self._at < len(b"\r\n") and self._buffer[self._at : self._at + 1] in (b"\r", b"\n"):
            self._at += 1
        first = self._delimiter[2:]
        if not first.startswith(self._buffer[self._at : self._at + len(first)]):
            raise _unreadable("it does not begin with its boundary")
        return self._boundary_ending_at(self._at + len(first))

    def _boundary_ending_at(self, end: int) -> bool:
        follows = self._buffer[end : end + 2]
        if len(follows) < 2:
            return False
        if follows == b"--":
            self._ended = True
            return False
        if follows != b"\r\n":
            raise _unreadable("its boundary is not followed by a line break")
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise BadRequest(f"The form has more than {MOST_PARTS} parts.")
        self._at = end + 2
        self._read_on = self._head
        return True

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._at, self._at + LONGEST_HEAD)
        if end < 0:
            if len(self._buffer) - self._at > LONGEST_HEAD:
                raise BadRequest(f"The header of a part of the form is longer than {LONGEST_HEAD} bytes.")
            return False
        head, first = self._buffer[self._at : end], self._delimiter[2:]
        if len(self._buffer) < end + 4 + len(first):
            return False
        if first in head or self._buffer.startswith(first, end + 4):
            raise _unreadable("a boundary stands in the header of a part, or right behind it")
        self._read_on = self._data
        if encoding := _encoding_of_model(head):
            if self.place is not None:
                raise BadRequest("The form has more than one 'model' field; send one.", param="model")
            self._encoding = encoding
            self._read_on = self._value
        self._at = end + 4
        return True

    def _data(self) -> bool:
        found = self._buffer.find(self._delimiter, self._at)
        if found < 0:
            self._at = max(self._at, len(self._buffer) - len(self._delimiter))
            return False
        self._at = found
        return self._boundary_ending_at(found + len(self._delimiter))

    def _value(self) -> bool:
        end = self._buffer.find(self._delimiter, self._at, self._at + LONGEST_MODEL)
        if end < 0:
            if len(self._buffer) - self._at > LONGEST_MODEL:
                raise BadRequest(f"'model' is longer than {LONGEST_MODEL} bytes.", param="model")
            return False
        try:
            self.model = self._buffer[self._at : end].decode(self._encoding) or None
        except UnicodeDecodeError:
            raise BadRequest(f"'model' is not {self._encoding}.", param="model") from None
        self.place = self._offset + self._at, self._offset + end
        self._at = end
        self._read_on = self._data
        return True


def is_multipart(content_type: str) -> bool:
    return content_type[:10].lower() == "multipart/"


def model_of(form: bytes, content_type: str) -> str | None:
    """Return the model of a complete form. Raise BadRequest."""
    reader = Form(content_type)
    reader.feed(form)
    reader.finish()
    return reader.model


def with_model(start: bytes, content_type: str, model: str) -> bytes | None:
    """Return the form, or the start of one, with another model and all other bytes unchanged; None if the field is
    missing or its value is ambiguous."""
    reader = Form(content_type)
    for at in range(0, len(start), STEP):
        reader.feed(start[at : at + STEP])
        if reader.place is not None:
            break
    if reader.place is None or "\r" in model or "\n" in model:
        return None
    first, end = reader.place
    return b"".join((start[:first], model.encode("utf-8", "surrogateescape"), start[end:]))


def _boundary(content_type: str) -> bytes:
    """Return the only boundary. Raise BadRequest for a header that parsers read differently."""
    found = _CONTENT_TYPE.fullmatch(content_type.encode("utf-8", "surrogateescape").strip(b" \t"))
    if found is None:
        raise BadRequest("Content-Type must be multipart/form-data with one boundary and plain parameters.")
    parameters = [(name.lower(), quoted or plain) for name, quoted, plain in _PARAMETER.findall(found[1])]
    boundaries: list[bytes] = [value for name, value in parameters if name == b"boundary"]
    charsets = [value.lower() for name, value in parameters if name == b"charset"]
    if len(boundaries) != 1 or not _BOUNDARY.fullmatch(boundaries[0]):
        raise BadRequest("Content-Type must name one boundary of 1 to 200 characters.")
    if charsets and charsets != [b"utf-8"]:
        raise BadRequest("The charset of a form must be utf-8.")
    return boundaries[0]


def _encoding_of_model(head: bytes) -> str:
    """Return the encoding of the part with this header; empty if it is not the model field."""
    disposition: bytes | None = None
    encoding = "UTF-8"
    lines = head.split(b"\r\n")
    if len(lines) > MOST_LINES:
        raise BadRequest(f"The header of a part of the form has more than {MOST_LINES} lines.")
    for line in lines:
        if not _FIELD.fullmatch(line):
            raise _unreadable("the header of a part has a malformed line")
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip(b" \t")
        if name == b"content-disposition":
            if disposition is not None:
                raise _unreadable("a part has two Content-Disposition headers")
            disposition = value
        elif name == b"content-transfer-encoding" and value.lower() not in _UNCODED:
            encoding = ""
        elif name == b"content-type" and b"charset" in value.lower():
            charset = _CHARSET.fullmatch(value)
            if charset is None:
                encoding = ""
            elif charset[1] is None and encoding:
                encoding = "ASCII"
    options = _options(disposition)
    if options[b"name"] != b"model":
        return ""
    if b"filename" in options or b"filename*" in options:
        raise BadRequest("'model' must be a field of the form, not a file.", param="model")
    if not encoding:
        raise BadRequest("'model' must be sent as plain UTF-8.", param="model")
    return encoding


def _options(disposition: bytes | None) -> dict[bytes, bytes]:
    """Return the parameters. Only the value of `name` is certain to be unchanged."""
    found = None
    if disposition is not None and b'\\\\"' not in disposition:
        found = _DISPOSITION.fullmatch(disposition.replace(b'\\"', b"\\\\"))  # each quote left ends a value
    if found is None:
        raise _unreadable("a part has no plain Content-Disposition: form-data; name=…")
    options: dict[bytes, bytes] = {}
    for name, value in _OPTION.findall(found[1]):
        name = name.lower()
        if name in options or (name.endswith(b"*") and name != b"filename*"):
            raise _unreadable(f"a part has an ambiguous parameter {name.decode()!r}")
        options[name] = value[1:-1] if value[:1] == b'"' else value
    if b"\\" in options.get(b"name", b"\\"):
        raise _unreadable("a part has no plain name")
    return options


def _unreadable(why: str) -> BadRequest:
    return BadRequest(f"The form could not be read in one way only: {why}.")
