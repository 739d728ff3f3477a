"""What all requests share that several pods answer together."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.ports import Clock, Random, Tally
from proxy.core.tasks import Tasks
from proxy.disagg.connector import Connector
from proxy.disagg.connectors import connector_named
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
