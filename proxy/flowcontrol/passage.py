"""A request at the gate, and what becomes of it there."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, final

from proxy.core.attempt import Attempt
from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Evicted, QueueFull
from proxy.core.request import InferenceRequest
from proxy.flowcontrol.band import Waiting

if TYPE_CHECKING:
    from proxy.flowcontrol.controller import FlowControl


@final
class Passage:
    """One request's, from its arrival at the gate to its end."""

    __slots__ = ("_control", "_task", "endpoint", "is_evicted", "legs", "request", "turn", "waiting")

    def __init__(self, control: FlowControl, request: InferenceRequest) -> None:
        self._control = control
        self.request = request
        self.is_evicted = False
        self.waiting: Waiting
        self.turn: asyncio.Future[QueueFull | None]
        """Comes when it goes on, or with why it does not."""
        self.endpoint: Endpoint | None = None
        self.legs: tuple[Attempt, ...] = ()
        """Those that answer, where what they take is counted."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self.turn = asyncio.get_running_loop().create_future()
        await self._control.enter(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.leave(self)
        if self.is_evicted and isinstance(error, asyncio.CancelledError) and self._was_not_abandoned():
            evicted = Evicted("The request made room for a more urgent one.")
            raise self._control.refusal(self.waiting, evicted) from None

    def end_waiting(self, refusal: QueueFull | None) -> None:
        if self.turn.done():
            return
        if refusal is None:
            self._control.let_go_on(self)
        self.turn.set_result(refusal)

    def evict(self) -> None:
        self.is_evicted = True
        if self._task is not None:
            self._task.cancel()

    def _was_not_abandoned(self) -> bool:
        """By its client too, at the same time."""
        return self._task is not None and self._task.uncancel() == 0


PASSAGE: DataKey[Passage] = DataKey("FlowControlPassage")
"""Of the gate that it is at; there is one in a pool."""
