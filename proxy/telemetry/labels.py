"""The values that labels take: few, whatever clients make up."""

from __future__ import annotations

import re

from proxy.core.attempt import Ending
from proxy.core.errors import Reason
from proxy.telemetry.instruments import OTHER

PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "score",
    "/score": "score",
    "/classify": "classify",
    "/pooling": "pooling",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/models": "models",
    "/v1/realtime": "realtime",
    "/health": "health",
}
"""The label `path`: exact paths here, their sub-paths under the same label, any other path is `other`."""

LONGEST_MODEL = 256
"""Characters of a model's name that can be a label; pods that serve any model answer for what clients make up."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_ENDINGS = {
    Reason.UPSTREAM_FAILED.value: Ending.UPSTREAM_FAILED.value,
    Reason.UPSTREAM_TIMED_OUT.value: Ending.TIMED_OUT.value,
}


def is_label(model: str) -> bool:
    """Not if it is too long, nor if it holds lone surrogates, which no exposition can write."""
    return len(model) <= LONGEST_MODEL and not _SURROGATE.search(model)


def path_label(path: str) -> str:
    return PATHS.get(path) or _group(path)


def outcome_label(outcome: str, refused: bool) -> str:
    """`outcome` is the value of an Ending, or of a Reason where the request was `refused`."""
    return _ENDINGS.get(outcome, "refused") if refused else outcome


def _group(path: str) -> str:
    for prefix, group in PATHS.items():
        if path.startswith(prefix + "/"):
            return group
    return "audio" if path.startswith("/v1/audio/") else OTHER
