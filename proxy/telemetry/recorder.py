"""The recorder for `kvlane replay` and `kvlane tune`: a line per request with times, hashes and result."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from proxy.core.attempt import Attempt, Ending
from proxy.core.endpoint import DEFAULT_POOL, Endpoint
from proxy.core.errors import Reason
from proxy.core.listener import Listener
from proxy.core.ports import ClientRequest, Clock
from proxy.core.request import InferenceRequest, frozen
from proxy.core.tasks import Tasks
from proxy.fleet.store import Fleet
from proxy.latency.forecast import objectives
from proxy.plugins.producers.session_id import SESSION_ID
from proxy.plugins.sessions import ID_HEADER
from proxy.prefix.hashing import Chain, chains
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, ChainMatch
from proxy.telemetry.lines import LineWriter, RotatingFile
from proxy.telemetry.metrics import Counter
from proxy.telemetry.observer import is_label, path_label
from proxy.telemetry.settings import RecordSettings

log = logging.getLogger(__name__)

VERSION = 1
BLOCK_TOKENS = 64
"""Tokens, of four bytes each, per hash of a chain near the start of a prompt; see `proxy.prefix.hashing`."""

MOST_BLOCKS = 2048
"""Largest number of blocks of a prompt that are hashed: the default of a producer."""

INTERVAL = 0.5
"""Seconds between batches."""

BATCH = 16
"""Number of requests that are recorded without a pause: about a millisecond for prompts of 4,000 tokens."""

SECRET_BYTES = 32
NAME_BYTES = 6
"""Bytes of a salted hash: among ten million different ones, two are equal with a probability of one in six."""

NAME_LENGTH = NAME_BYTES * 4 // 3
"""Characters of a salted hash in base64."""

Entry = tuple[float, int, Ending | Reason, float, Mapping[str, Any], tuple[Chain, ...], Endpoint | None]
"""(arrival, status, outcome, end, fields of the request, its hashes, its pod)."""


class RequestRecorder(Listener):
    """The listener that writes a line for each ended request. An error costs `lost` lines, never a request."""

    def __init__(self, settings: RecordSettings, clock: Clock, lost: Counter, fleet: Fleet) -> None:
        self._key = key_path(Path(settings.file))
        self._wall = clock.wall
        self._now = clock.now
        self._salt: Salt
        self._installed: Installation
        self._epoch: float
        self._lost = lost
        self._fleet = fleet
        self._entries: list[Entry] = []
        self._pods: dict[str, tuple[int, int]] = {}
        path = Path(settings.file)
        file = RotatingFile(path, self._key, settings.max_size, settings.keep, self._head)
        self._writer = LineWriter("the record", file.write, lost.add)

    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        """Copy the values to record, so that no body is kept longer than its request."""
        if attempt is None and not isinstance(outcome, Reason):
            return  # a response of kvlane: a list of models
        try:
            if attempt is None:
                about: tuple[Any, ...] = ({"kind": path_label(client_request.path)}, (), None)
            else:
                about = (_request_fields(client_request, attempt), _chains(attempt.request), attempt.endpoint)
            self._entries.append((client_request.received_at, status, outcome, self._now(), *about))
        except Exception:
            self._lost.add()
            log.exception("request %s is missing in the record", client_request.id)

    def _flush(self) -> None:
        while self._entries:
            self._write_batch()

    async def start(self, stack: AsyncExitStack) -> None:
        """Record from now on; write the rest when the stack ends."""
        self._installed = installation(self._key, self._wall())
        self._salt = Salt(self._installed.secret)
        self._epoch = self._wall() - self._now() - self._installed.started
        await stack.enter_async_context(self._writer)
        stack.callback(self._flush)
        tasks = await stack.enter_async_context(Tasks())
        tasks.keep(self._run, "record-of-requests")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL)
            while self._entries:
                self._write_batch()
                await asyncio.sleep(0)

    def _write_batch(self) -> None:
        batch = self._entries[:BATCH]
        del self._entries[: len(batch)]
        if self._writer.is_behind:
            self._writer.drop(len(batch))
            return
        try:
            adapters = frozenset(card["id"] for card in self._fleet.models() if card.get("parent"))
            requests = [self._line(entry, adapters) for entry in batch]
            self._writer.put(b"".join([*self._news_of_pods(batch), *requests]))
        except Exception:
            self._lost.add(len(batch))
            log.exception("%d requests are missing in the record", len(batch))

    def _line(self, entry: Entry, adapters: frozenset[str]) -> bytes:
        received, status, outcome, ended, attempted, hashes, pod = entry
        line = {"t": round(received + self._epoch, 6), **attempted}
        for kind in ("tenant", "session"):
            if kind in line:
                line[kind] = self._salt.name(kind, line[kind])
        if line.get("model") in adapters:
            line["lora"] = True
        if pod is not None:
            line |= {"chain": list(map(self._salt.chain, hashes)), "pod": pod.name}
        line |= {"status": status, "outcome": outcome.value, "duration": round(ended - received, 6)}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def _news_of_pods(self, batch: Sequence[Entry]) -> list[bytes]:
        """Return a line for every pod whose KV cache size is new or has changed."""
        found = []
        for pod in {pod for *_, pod in batch if pod is not None}:
            size = (pod.metrics.block_size, pod.metrics.blocks)
            if all(size) and self._pods.get(pod.name) != size:
                self._pods = {**self._pods, pod.name: size}
                found.append(_pod_line(pod.name, size))
        return found

    def _head(self, lines: bytes) -> bytes:
        """Return the first lines of a file, before these `lines`; called in the writer's thread, with the lock on the
        file of the secret. That file is still empty if it could not be created at the start."""
        if not self._key.stat().st_size:
            self._key.write_bytes(self._installed.packed())
        head = {
            "kvlane_record": VERSION,
            "started": self._installed.started,
            "block_tokens": BLOCK_TOKENS,
            "salt": self._salt.fingerprint,
        }
        first = orjson.dumps(head, option=orjson.OPT_APPEND_NEWLINE)
        pods = (_pod_line(name, size) for name, size in self._pods.items())
        return b"".join([first, *(pod for pod in pods if pod not in lines)])


def key_path(path: Path) -> Path:
    """Return the path of the file with the secret of a record."""
    return path.with_name(path.name + ".key")


def _pod_line(name: str, size: tuple[int, int]) -> bytes:
    line = {"pod": name, "block_size": size[0], "blocks": size[1]}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _chains(request: InferenceRequest) -> tuple[Chain, ...]:
    """Return the hashes of the producer, if a producer cuts prompts as records do."""
    match = request.state.read(PREFIX_MATCH)
    if isinstance(match, ChainMatch) and match.block_size == BLOCK_TOKENS:
        return match.chains
    prompt = request.state.read(TOKENIZED_PROMPT) or request.prompt
    return chains(prompt, request.model, BLOCK_TOKENS, MOST_BLOCKS)


def _request_fields(client_request: ClientRequest, attempt: Attempt) -> dict[str, Any]:
    """Return the known fields of a request. Tenant and session are not salted yet. The session is the one that the
    producer found or the client's header names."""
    request, usage = attempt.request, attempt.usage
    first = attempt.stream_started_at or attempt.first_byte_at
    prompt = request.state.read(TOKENIZED_PROMPT) or request.prompt
    output = usage.completion_tokens if usage is not None else attempt.chunks if request.stream else None
    ttft, tpot = objectives(request) or (None, None)
    pool, session = attempt.endpoint.pool, request.state.read(SESSION_ID) or request.headers.get(ID_HEADER, "").strip()
    known = {
        "kind": path_label(client_request.path),
        "pool": pool if pool != DEFAULT_POOL else None,
        "model": request.model if is_label(request.model) else None,
        "stream": request.stream or None,
        "estimated_tokens": prompt.tokens,
        "max_tokens": request.max_tokens or None,
        "prompt_tokens": usage.prompt_tokens if usage is not None else None,
        "output_tokens": output,
        "cached_tokens": usage.cached_tokens if usage is not None else None,
        "expected_cached_tokens": attempt.predicted_cached_tokens,
        "priority": request.priority or None,
        "tenant": request.tenant or None,
        "session": session or None,
        "slo_ttft": ttft,
        "slo_tpot": tpot,
        "attempts": attempt.number + 1,
        "ttft": None if first is None else round(first - client_request.received_at, 6),
    }
    return {name: value for name, value in known.items() if value is not None}


class Salt:
    """BLAKE2b with the secret as its key: a guess of a prompt cannot be verified with the record alone."""

    def __init__(self, secret: bytes) -> None:
        self._hash = partial(blake2b, key=secret, digest_size=NAME_BYTES)
        self.fingerprint = self.name("key", "")
        """A value that is equal in records with comparable hashes."""

    def name(self, kind: str, text: str) -> str:
        """Return the salted name. Equal text has equal names only within a `kind`."""
        digest = self._hash(text.encode("utf-8", "surrogatepass"), person=kind.encode()).digest()
        return urlsafe_b64encode(digest).decode()

    def chain(self, hashes: Sequence[int]) -> str:
        digests = [self._hash(one.to_bytes(8, "little")).digest() for one in hashes]
        return urlsafe_b64encode(b"".join(digests)).decode()


@frozen
class Installation:
    """The secret and start of a record. `started` is the wall time from which the times of all records are counted."""

    secret: bytes
    started: float

    def packed(self) -> bytes:
        return orjson.dumps({"secret": b64encode(self.secret).decode(), "started": self.started})


def installation(path: Path, now: float) -> Installation:
    """Return the content of the file, which only its owner may read; create it if it is missing. If that fails, return
    temporary values, which are stored when the first record can be written."""
    new = Installation(os.urandom(SECRET_BYTES), now)
    why: object = "it holds no secret of a record"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = file.read()
            if not known:
                file.write(new.packed())
                return new
        read = orjson.loads(known)
        return Installation(b64decode(read["secret"], validate=True), float(read["started"]))
    except OSError as error:
        why = error
    except (KeyError, TypeError, ValueError):
        pass
    log.warning("using a temporary secret for the record, because %s cannot be used: %s", path, why)
    return new
