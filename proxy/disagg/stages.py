"""Attempts whose responses are for the next attempt of a request: sent to one pod, or another, until one responds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from proxy.core.attempt import Attempt, Stage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadGateway, GatewayTimeout, SuspectedPoison, UpstreamFailed
from proxy.core.ports import Clock, Legs, Random, Relay, Tally
from proxy.core.request import changed
from proxy.core.tasks import Tasks
from proxy.disagg.connector import Connector
from proxy.disagg.connectors import connector_named
from proxy.disagg.requests import encode_bodies, fields_of_pod, merged
from proxy.disagg.settings import DisaggregationSettings
from proxy.fleet.ledger import Ledger
from proxy.reliability.failover import Failover

Counted = Callable[[str], Tally]
"""What counts requests, by what came of them."""


class Shared:
    def __init__(
        self,
        settings: DisaggregationSettings,
        failover: Failover,
        ledger: Ledger,
        clock: Clock,
        random: Random,
        tasks: Tasks,
        counted: Counted,
        expose_endpoint: bool = True,
    ) -> None:
        """`tasks` finish what nobody waits for. `expose_endpoint`: clients are told who computed the prompt."""
        self.failover = failover
        self.ledger = ledger
        self.clock = clock
        self.random = random
        self.tasks = tasks
        self.counted = counted
        self.expose_endpoint = expose_endpoint
        self.connector: Connector = connector_named(settings.connector)()
        self.prefill_timeout = settings.prefill_timeout


Prepare = Callable[[Attempt], None]
"""Makes the leg's request one for its pod."""


@dataclass(slots=True)
class Stages:
    """Of one request."""

    shared: Shared
    fields: dict[str, Any]
    """Of the client's body."""
    relay: Relay
    legs: Legs

    def leg(self, attempt: Attempt, stage: Stage, pods: tuple[Endpoint, ...], body: bytes = b"") -> Attempt:
        """The leg of the same client that asks the first of `pods`, or the others after it."""
        request = changed(attempt.request, body=body, stream=False, max_tokens=1, asks_usage=False, naming=None)
        leg = Attempt(request, Decision(pods[0], pods[1:]), pods[0], 0, self.shared.clock.now())
        leg.stage, leg.answers = stage, False
        return leg

    async def ask(
        self, leg: Attempt, prepare: Prepare | None = None, held: ExitStack | None = None
    ) -> tuple[Attempt, bytes] | None:
        """The leg that was answered, and with what; None if nobody could. It stays open until `held` closes. Raises
        RequestError if nobody is to be asked any more."""
        while True:
            if prepare is not None:
                prepare(leg)
            try:
                with ExitStack() as attempt:
                    attempt.enter_context(self.legs(leg))
                    answer = await self.relay.collect(leg, self.shared.prefill_timeout)
                    self.shared.ledger.first_byte(leg)
                    if held is not None:
                        held.enter_context(attempt.pop_all())
                return leg, answer
            except UpstreamFailed as error:
                following = await self.following(leg, error.with_traceback(None))
            if following is None:
                return None
            leg = following

    async def encode(self, attempt: Attempt) -> dict[str, Any]:
        """What the next stage has to say of its media, which are shared out to the encode pods. What these fail, the
        next stage does itself."""
        pods = attempt.decision.encode
        bodies = encode_bodies(attempt.request.path, self.fields) if pods else []
        if not bodies:
            return {}
        try:
            async with asyncio.TaskGroup() as group:
                asked = []
                for number, body in enumerate(bodies):
                    at = number % len(pods)
                    leg = self.leg(attempt, Stage.ENCODE, pods[at:] + pods[:at], body)
                    asked.append(group.create_task(self.ask(leg)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        answers = (
            fields_of_pod(answered[1])
            for task in asked
            if (answered := task.result()) is not None and answered[0].status == 200
        )
        return merged([answer for answer in answers if answer is not None])

    async def following(self, leg: Attempt, error: UpstreamFailed) -> Attempt | None:
        """On one other pod, where the next stage can do without; on as many as any request may try where it cannot.
        None if nobody is left. Raises RequestError if nobody is to be asked any more."""
        spares = leg.stage is Stage.ENCODE or not self.shared.connector.needs_pair
        try:
            following = await self.shared.failover.following(leg, error, spares)
        except SuspectedPoison:
            raise
        except (BadGateway, GatewayTimeout):
            if self.shared.clock.now() >= leg.request.deadline:
                raise
            return None
        following.stage, following.answers = leg.stage, False
        return following
