"""What is read of a pod when it is scored: published where it changes."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, LoadView

Terms = tuple[float, float, float]
"""Seconds: of any prompt, of an uncached token, and of a pair of tokens, of which every pair is two."""


class Published:
    """Of one pod, until something changes. Slots, for an attribute takes a third more to read without them where there
    are more than thirty."""

    __slots__ = (
        "cost",
        "due",
        "endpoint",
        "head",
        "look_at",
        "own",
        "patience",
        "rest",
        "step",
        "tpot",
        "view",
    )

    endpoint: Endpoint
    view: LoadView | None
    """The one that all this was made with; None if more has changed."""
    head: Attempt | None
    """The first in line."""
    due: float
    """When it should be answered."""
    patience: float
    """Seconds by which it is expected later for each that it is overdue, negative."""
    look_at: float
    """When to look whether it was."""
    rest: float
    """Seconds of work behind it."""
    own: Terms
    """What a prompt takes, once the pod turns to it."""
    cost: Terms
    """The same, and what it costs others."""
    step: float
    """Seconds per token of the answers that run."""
    tpot: float
    """The same of one more answer."""


def seconds(pod: Published, uncached: float, prompt: float, now: float) -> float:
    """From now until the pod turns to a prompt, of which so many tokens are not cached there, and then by the terms of
    its `own`. So: rest + wait + fixed + tokens * (per_token + per_pair * (2 * prompt - tokens)), where wait is what is
    left until it is due, or its share of what is overdue."""
    fixed, per_token, per_pair = pod.own
    left = pod.due - now
    if left < 0.0:
        left *= pod.patience
    return pod.rest + left + fixed + uncached * (per_token + per_pair * (2.0 * prompt - uncached))


def tpots(pods: Sequence[Published]) -> list[float]:
    """Seconds per token of one more answer."""
    return [pod.tpot for pod in pods]
