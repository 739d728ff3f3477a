"""What is read of a pod when it is scored: published where it changes, and looked up for many pods at once."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.endpoint import Endpoint, LoadView
from proxy.core.exchange import Exchange


class Nobody:
    """Stands first in line where nobody does."""

    first_byte_at: float | None = None


NOBODY = Nobody()

Terms = tuple[float, float, float]
"""Seconds: of any prompt, of an uncached token, and of a pair of tokens, of which every pair is two."""


class Published:
    """Of one pod, until something changes."""

    endpoint: Endpoint
    view: LoadView | None
    """The one that all this was made with; None if more has changed."""
    head: Exchange | Nobody
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


def seconds(
    pods: Sequence[Published], uncached: Sequence[float], prompt: float, now: float, costs: bool = False
) -> list[float]:
    """From now until each pod turns to a prompt, of which so many tokens are not cached there, and then by the terms of
    its `own`, or those of the `cost`. So: rest + wait + fixed + tokens * (per_token + per_pair * (2 * prompt -
    tokens)), where wait is what is left until it is due, or its share of what is overdue."""
    twice, found = 2.0 * prompt, []
    # Four pods take 9,200 instructions in this loop, and 37,300 in iterators of C that map operators.
    for pod, tokens in zip(pods, uncached):  # noqa: B905  # to be strict takes 450 more
        fixed, per_token, per_pair = pod.cost if costs else pod.own
        left = pod.due - now
        if left < 0.0:
            left *= pod.patience
        found.append(pod.rest + left + fixed + tokens * (per_token + per_pair * (twice - tokens)))
    return found


def tpots(pods: Sequence[Published]) -> list[float]:
    """Seconds per token of one more answer."""
    return [pod.tpot for pod in pods]
