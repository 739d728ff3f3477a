"""vLLM's P2pNcclConnector: the prefill pod pushes to the address that it reads in the request's id, and the decode pod
waits for what comes under the same id.

So neither pod can serve a request whose id says nothing, or not for long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Items

from proxy.lab.sim.sequence import Sequence, Transfer
from proxy.lab.sim.transfer.connector import Asked, Connector, Incoming, TransferFailed
from proxy.lab.sim.transfer.fabric import Fabric, Holding

ADDRESSES = re.compile(r"___prefill_addr_[^_:]+:\d+___decode_addr_[^_:]+:\d+_")


class P2pNccl(Connector):
    def arrange(self, asked: Asked, sequences: Items[Sequence]) -> None:
        for index, sequence in enumerate(sequences):
            key = f"p2p-nccl {asked.id} {index}"
            if self.config.role == "prefill":
                if not ADDRESSES.search(asked.id):
                    raise TransferFailed(f"Request id {asked.id} does not contain hostname and port")
                sequence.transfer = Pushed(self.fabric, key, is_lost=asked.is_lost)
            elif self.config.role == "decode":
                sequence.transfer = Incoming(self, asked, key)


class Pushed(Transfer):
    """Nothing is kept: it lies with the other pod as soon as it is computed."""

    def __init__(self, fabric: Fabric, key: str, *, is_lost: bool) -> None:
        self._fabric = fabric
        self._key = key
        self._is_lost = is_lost

    def computed(self, sequence: Sequence) -> None:
        if not self._is_lost:
            holding = Holding(lambda: self._fabric.forget(self._key))
            holding.computed()
            self._fabric.announce(self._key, holding)
