"""The process that reads large bodies, one after the other within a memory limit, until its standard input ends."""

from __future__ import annotations

import pickle
import resource
import sys

from proxy.core.errors import BodyTooLarge, RequestError
from proxy.openai.parse import parse
from proxy.parsing.wire import LENGTH, Question, Reply, framed, taken_apart
from proxy.telemetry import standard_error

MEMORY = 2 << 30
"""Bytes of address space. The values of a body of 64 MiB take 1.5 GiB at worst: 64 bytes for each three."""


def main() -> None:
    standard_error.install()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while header := source.read(LENGTH):
        question: Question = pickle.loads(source.read(int.from_bytes(header, "little")))
        sink.writelines(answer(question, source.read(question.size)))
        sink.flush()


def answer(question: Question, body: bytes) -> list[bytes]:
    try:
        return taken_apart(parse(question.path, body, question.content_type), body)
    except RequestError as error:
        return [framed(Reply(error))]
    except (MemoryError, SystemError):  # SystemError: orjson's, where memory is short
        return [framed(Reply(BodyTooLarge("The request body takes too much memory to read.")))]


if __name__ == "__main__":
    main()
