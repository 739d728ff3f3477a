"""The process that reads large bodies, one after the other, until its standard input ends."""

from __future__ import annotations

import pickle
import sys

from proxy.core.errors import RequestError
from proxy.openai.parse import parse
from proxy.parsing.wire import LENGTH, Question, Reply, framed, taken_apart


def main() -> None:
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


if __name__ == "__main__":
    main()
