"""The models that pods list, and the reads of these lists on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.errors import BadRequest, Declined
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.fleet.records import PodRecord

MOST_KNOWN = 20_000
"""Number of models that pods no longer list but that are remembered, to distinguish an unreachable model from one that
never existed."""


class NamedModels:
    """The models that the pods of a fleet list, or have listed."""

    wakes = False
    """Whether pods that sleep are woken when they are needed."""

    def __init__(self) -> None:
        self._records: dict[str, PodRecord] = {}
        self._known: dict[str, None] = {}
        """All models that were ever listed, the latest at the end; the oldest are forgotten."""

    def _learn_models(self, record: PodRecord) -> bool:
        """Read the models of a pod from its settings and its cards. Return whether they have changed."""
        models = frozenset(record.pod.models or [card["id"] for card in record.cards]) or None
        adapters = frozenset(card["id"] for card in record.cards if card.get("parent"))
        for endpoint in record.endpoints:
            update(endpoint, adapters=adapters)
        is_new = models != record.endpoint.models
        if is_new:
            for endpoint in record.endpoints:
                update(endpoint, models=models)
            for model in models or ():
                self._known.pop(model, None)
                self._known[model] = None
            while len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return is_new

    def knows(self, model: str) -> bool:
        """Return False if no pod ever listed the model, although each pod has responded and lists its models."""
        if not self._known or model in self._known or self.is_listed(model):
            return True
        return any(record.takes_any for record in self._records.values())

    def is_listed(self, model: str) -> bool:
        return any(model in (record.endpoint.models or ()) for record in self._records.values())

    def only_model(self) -> str:
        """Return the model of a request that names none: the only one, apart from LoRA adapters and aliases; empty if
        pods list none. Raise BadRequest if there are several."""
        adapters = {card["id"] for record in self._records.values() for card in record.cards if card.get("parent")}
        models = {model for record in self._records.values() for model in record.first_names} - adapters
        if len(models) > 1 and (cards := self.models()):
            names = ", ".join(card["id"] for card in cards)
            raise BadRequest(f"'model' is missing, and there are several: {names}.", param="model")
        return models.pop() if len(models) == 1 else ""

    def models(self) -> list[dict[str, Any]]:
        """Return the cards of the models that pods serve, or would serve once woken. If several pods list a model, the
        card is that of the first pod by name."""
        merged: dict[str, dict[str, Any]] = {}
        records = sorted(self._records.values(), key=lambda record: record.name)
        for record in records:
            if record.endpoint.state is EndpointState.READY or (self.wakes and record.can_be_woken):
                for card in record.shown_cards:
                    merged.setdefault(card["id"], dict(card))
        return list(merged.values())


NOT_FOUND = 404

ROUND_EVERY = 1.0
"""Least seconds between two rounds, and between two reads of one pod, however many unknown models clients request."""

LONGEST_WAIT = 2.0
"""Longest time in seconds that a request waits for a round, and a round for its pods."""


class ModelReads(Protocol):
    """Lets the gateway request reads of the pods' models."""

    def next_round(self) -> asyncio.Future[None]:
        """Request a read of all ready pods. The future is done after a round that starts after this call."""

    def read_soon(self, endpoint: Endpoint) -> None:
        """Request a read of one pod."""


class ReadsAfterNotFound(Listener):
    """Requests a read of a pod's models after it responded with 404."""

    def __init__(self, reads: ModelReads) -> None:
        self._reads = reads

    def ended_with_evidence(self, attempt: Attempt, error: BaseException | None) -> None:
        status = error.status if isinstance(error, Declined) else attempt.status
        if status == NOT_FOUND and attempt.request.model:
            self._reads.read_soon(attempt.endpoint)


class ModelRounds:
    """Rounds in which the models of all ready pods are read. Requests that arrive before a round starts share it."""

    def __init__(self, read: Callable[[], Iterable[asyncio.Future[None]]], clock: Clock, tasks: Tasks) -> None:
        """`read` starts a read of each pod and returns the futures."""
        self._read = read
        self._clock = clock
        self._tasks = tasks
        self._next: asyncio.Future[None] | None = None
        self._not_before = 0.0

    def next(self) -> asyncio.Future[None]:
        """Return a future that is done after the next round."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            self._tasks.start(self._read_all(self._next), "round of model reads")
        return self._next

    async def _read_all(self, over: asyncio.Future[None]) -> None:
        try:
            await asyncio.sleep(self._not_before - self._clock.now())
            self._next, self._not_before = None, self._clock.now() + ROUND_EVERY
            if reads := set(self._read()):
                await asyncio.wait(reads, timeout=LONGEST_WAIT)
        finally:
            if not over.done():
                over.set_result(None)
