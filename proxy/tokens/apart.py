"""The process that tokenises large bodies, one after the other, until its standard input ends.

A message is a length of eight bytes (little-endian) and a pickle: first the model, then (path, body) each time. The
answer to that are the packed token ids of each prompt. Both ends are this program, so the pickle may be trusted.
"""

from __future__ import annotations

import pickle
import sys
from typing import IO, Any

from proxy.core.clock import SystemClock
from proxy.core.tokens import LocalModel
from proxy.telemetry import standard_error

LENGTH = 8


def framed(value: Any) -> bytes:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(LENGTH, "little") + data


def main() -> None:
    from proxy.tokens.model import Model  # needs an extra, and the other end imports this module too

    standard_error.install()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    settings: LocalModel = _read(source)
    model = Model(settings, SystemClock().wall)
    while (question := _read(source)) is not None:
        sink.write(framed(model.parts_of(*question)))
        sink.flush()


def _read(source: IO[bytes]) -> Any:
    """None at the end."""
    header = source.read(LENGTH)
    return pickle.loads(source.read(int.from_bytes(header, "little"))) if header else None


if __name__ == "__main__":
    main()
