"""Flow control: which requests are admitted, and which wait in a queue. A configuration without limits imports no
queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.request import DataKey

if TYPE_CHECKING:
    from proxy.flowcontrol.controller import QueueTicket

TICKET: DataKey[QueueTicket] = DataKey("FlowControlTicket")
"""The ticket of the request in the queue of its pool."""
