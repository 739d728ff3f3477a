"""What stands in a record for prompts, tenants and sessions: equal for equal ones, and no use without the secret."""

from __future__ import annotations

import fcntl
import logging
import os
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import orjson

from proxy.core.frozen import frozen

log = logging.getLogger(__name__)

SECRET_BYTES = 32
NAME_BYTES = 6
"""Of a salted hash: among ten million different ones, two are equal with a chance of one in six."""

NAME_LENGTH = NAME_BYTES * 4 // 3
"""Characters that it takes in base64."""


class Salt:
    """BLAKE2b with the secret as its key: who has a record and guesses a prompt cannot check the guess."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.fingerprint = self.name("key", "")
        """Equal in records whose hashes can be compared."""

    def name(self, kind: str, text: str) -> str:
        """Equal text has equal names within a `kind` only."""
        digest = blake2b(
            text.encode("utf-8", "surrogatepass"), key=self._secret, person=kind.encode(), digest_size=NAME_BYTES
        )
        return urlsafe_b64encode(digest.digest()).decode()

    def chain(self, hashes: Sequence[int]) -> str:
        """The names of a prompt's hashes, one after the other."""
        secret = self._secret
        return urlsafe_b64encode(
            b"".join(
                [blake2b(one.to_bytes(8, "little"), key=secret, digest_size=NAME_BYTES).digest() for one in hashes]
            )
        ).decode()


@frozen
class Installation:
    """`started` is the wall time from which on the times of all records are counted."""

    secret: bytes
    started: float


def installation(path: Path, now: float) -> Installation:
    """What the file says, which only its owner may read; made if it is missing. Where that fails it is made up for as
    long as the process lives: what is recorded then can be compared with nothing else."""
    try:
        return _read(path, now)
    except (OSError, ValueError) as error:
        log.warning("the secret of the record is a temporary one, as %s cannot be used: %s", path, error)
        return Installation(os.urandom(SECRET_BYTES), now)


def _read(path: Path, now: float) -> Installation:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = file.read()
        if not known:
            secret = os.urandom(SECRET_BYTES)
            file.write(orjson.dumps({"secret": b64encode(secret).decode(), "started": now}))
            return Installation(secret, now)
    try:
        said = orjson.loads(known)
        return Installation(b64decode(said["secret"], validate=True), float(said["started"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError("it holds no secret of a record") from error
