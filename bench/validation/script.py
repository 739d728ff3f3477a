"""Requests for both engines: conversations that continue their own responses, and documents that push them out."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

FIRST_ID, LAST_ID = 10, 3_999
"""Token ids that every vocabulary has, without the special ones at its beginning."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`pause` seconds after the previous response (or the start of the session) `added` is sent."""

    pause: float
    added: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    begins: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn's. Seconds; `per_token` is that of the tokens after the first."""

    session: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    first_token: float
    per_token: float


def ids(rng: Random, tokens: int) -> tuple[int, ...]:
    """New text."""
    return tuple(rng.randint(FIRST_ID, LAST_ID) for _ in range(tokens))


def script(seed: int, words: int, requests: int, rate: float) -> list[Session]:
    """Chats of two to five turns under one of two system prompts, and one long document for every three of them;
    about `requests` in all, sessions that begin at random, `rate` requests per second together. The same `seed` with
    other `words` changes only the text, which is new then."""
    rng, text = Random(seed), Random(words)
    systems = [ids(text, 480) for _ in range(2)]
    sessions, planned, now = [], 0, 0.0
    while planned < requests:
        turns = _document(rng, text) if len(sessions) % 4 == 3 else _chat(rng, text, rng.choice(systems))
        planned += len(turns)
        sessions.append(Session(now, turns))
        now += rng.expovariate(rate) * len(turns)
    return sessions


def _chat(rng: Random, text: Random, system: tuple[int, ...]) -> tuple[Turn, ...]:
    start = Turn(0.0, system + ids(text, rng.randint(30, 300)), rng.randint(16, 64))
    more = (_question(rng, text) for _ in range(rng.randint(1, 4)))
    return (start, *more)


def _question(rng: Random, text: Random) -> Turn:
    return Turn(rng.expovariate(1.0), ids(text, rng.randint(30, 300)), rng.randint(16, 64))


def _document(rng: Random, text: Random) -> tuple[Turn, ...]:
    return (Turn(0.0, ids(text, rng.randint(1_000, 3_500)), rng.randint(8, 32)),)
