"""Parsing of request bodies: at once, or in another process if that would delay all other requests."""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Iterator, Sequence

from proxy.core.errors import BodyTooLarge, RequestError, UnknownModel
from proxy.core.ports import ClientRequest
from proxy.core.request import EMPTY_PROMPT, TIME_LIMIT, InferenceRequest, Prompt, time_limit
from proxy.offload import OffloadPool, serve
from proxy.openai.bodies import is_light
from proxy.openai.multipart import STEP, Form, is_multipart
from proxy.openai.parse import Parsed, model_in, parse
from proxy.telemetry.lines import guard_standard_error

QUICK = 8 << 20
"""Bytes of a body that usually parses within 0.1 s. One process is reserved for these."""

_TRIES = 2
"""A process may be killed for reasons unrelated to the body that it parses."""

MOST = 2 << 20
"""Bytes of a prompt that are returned, four times what is hashed by default: copying 8 MiB takes 5 ms."""

MOST_PARTS = 4096
"""Parts of a prompt that are returned: splitting 65,000 takes 10 ms."""

MEMORY = 2 << 30
"""Bytes of address space of a process. The values of a body of 64 MiB take 1.5 GiB at worst: 64 bytes for three."""

LONGEST_MODEL = 4096
"""Characters of a model's name, which may be the path of a file. The access log, decisions and statistics keep names
after their requests."""

_NAMED_BY_QUERY = ("GET", "HEAD", "DELETE")
"""Methods of requests whose query names the model."""


def parse_here(client_request: ClientRequest) -> Parsed:
    """Parse the body here. A request without a body may name no model; any pod serves it. Raise BadRequest."""
    if client_request.method in _NAMED_BY_QUERY:
        return Parsed(model_in(client_request.query) or "", client_request.body)
    return parse(client_request.path, client_request.body, client_request.headers.get("content-type", ""))


def may_parse_here(client_request: ClientRequest) -> bool:
    """Return whether parsing the body blocks the event loop for a few milliseconds at most."""
    return client_request.method in _NAMED_BY_QUERY or is_light(
        client_request.body, client_request.headers.get("content-type", "")
    )


async def parsed_form(client_request: ClientRequest) -> Parsed:
    """Parse a large form, or the start of one, in steps between which other requests are served. Raise BadRequest."""
    form = Form(client_request.headers.get("content-type", ""))
    for start in range(0, len(client_request.body), STEP):
        form.feed(client_request.body[start : start + STEP])
        await asyncio.sleep(0)
    if client_request.upload is None:
        form.finish()
    return Parsed(form.model, client_request.body)


def is_large_form(client_request: ClientRequest) -> bool:
    """Return whether to use `parsed_form`."""
    if client_request.method in _NAMED_BY_QUERY:
        return False
    return client_request.upload is not None or (
        len(client_request.body) > STEP and is_multipart(client_request.headers.get("content-type", ""))
    )


def request_of(client_request: ClientRequest, parsed: Parsed, model: str, seconds: float) -> InferenceRequest:
    """Return the request, with `seconds` of time unless its client sets less. Raise BadRequest, or UnknownModel for a
    name that is too long for any model."""
    headers = client_request.headers
    if len(model) > LONGEST_MODEL:
        raise UnknownModel(model)
    if TIME_LIMIT in headers:
        seconds = time_limit(headers, seconds)
    _, body, prompt, stream, max_tokens, _, _ = parsed
    priority, tenant, since = 0, "", client_request.received_at
    # By position: keywords would be put into a dictionary first (hot path, see docs/notes/cpu.md).
    return InferenceRequest(
        client_request.id,
        client_request.path,
        model,
        prompt,
        body,
        headers,
        stream,
        max_tokens,
        priority,
        tenant,
        since,
        since + seconds,
    )


class BodyParser(OffloadPool):
    """`async with BodyParser()`: processes that parse bodies.

    One process takes any body, the other one bodies of up to QUICK bytes, so these do not wait for larger ones. Memory
    beyond the budget is bounded: QUICK bytes for each process here, and in the process what the values of one body
    take."""

    def __init__(self) -> None:
        super().__init__("proxy.parsing", limits=(QUICK, math.inf), kill_above=QUICK)

    async def parse_apart(self, path: str, body: bytes, content_type: str) -> Parsed:
        """As `openai.parse`, in another process. Also raise BodyTooLarge for a body that crashes the processes."""
        for _ in range(_TRIES):
            reply = await self.ask((path, content_type), body)
            if reply is not None:
                return _assembled(*reply, body)
        raise BodyTooLarge("The request body takes too much memory to read.")


_Reply = tuple[Parsed | RequestError, str, int]
"""The result of the parser without its body and prompt, or its error; and the salt and tokens of the prompt. The
following pieces are the body, empty if it is unchanged, and the start of the prompt's parts."""


def _assembled(reply: _Reply, pieces: Sequence[bytes], body: bytes) -> Parsed:
    """Return the result of the parser. Raise its error."""
    parsed, salt, tokens = reply
    if isinstance(parsed, RequestError):
        raise parsed
    changed, *parts = pieces
    return parsed._replace(body=changed or body, prompt=Prompt(tuple(parts), salt, tokens))


# The process that parses.


def main() -> None:
    guard_standard_error()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    serve(lambda _: _reply)


def _reply(arguments: tuple[str, str], body: bytes) -> tuple[_Reply, Sequence[bytes]]:
    path, content_type = arguments
    try:
        parsed = parse(path, body, content_type)
        prompt = parsed.prompt
        pieces = [b"" if parsed.body is body else parsed.body, *_beginning(prompt.parts)]
        return (parsed._replace(body=b"", prompt=EMPTY_PROMPT), prompt.salt, prompt.tokens), pieces
    except RequestError as error:
        return (error, "", 0), ()
    except (MemoryError, SystemError):  # SystemError: orjson's, where memory is short
        return (BodyTooLarge("The request body takes too much memory to read."), "", 0), ()


def _beginning(parts: Sequence[bytes]) -> Iterator[bytes]:
    left = MOST
    for part in parts[:MOST_PARTS]:
        yield part[:left]
        left -= min(left, len(part))


if __name__ == "__main__":
    main()
