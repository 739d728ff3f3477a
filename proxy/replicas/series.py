"""What is counted of the other hosts."""

from __future__ import annotations

from proxy.telemetry.catalogue import Catalogue


class ReplicaSeries:
    def __init__(self, catalogue: Catalogue) -> None:
        self.known = catalogue.replicas_known.cell()
        self.disagreeing = catalogue.replicas_disagreeing.cell()
        self.up = catalogue.replicas_store_up.cell()
        self.staleness = catalogue.replicas_staleness.cell()
        self.losses = catalogue.replicas_store_losses.cell()
        self.missed = catalogue.replicas_missed.cell()
        self.garbled = catalogue.replicas_garbled.cell()
        self.foreign = catalogue.replicas_foreign.cell()
        self.sent, self.received = (catalogue.replicas_bytes.cell(way) for way in ("sent", "received"))
        self.messages_sent, self.messages_received = (
            catalogue.replicas_messages.cell(way) for way in ("sent", "received")
        )
