"""vLLM's ExampleConnector, once SharedStorageConnector: every pod writes what it has computed into a common directory,
by the hash of the prompt, and every pod looks there first.

Whole blocks of exactly the same prompt, which count as cached.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import ClassVar

from proxy.lab.sim.prompt import text_hash
from proxy.lab.sim.sequence import Sequence
from proxy.lab.sim.text import BYTES_PER_TOKEN
from proxy.lab.sim.transfer.connector import Asked, Connector, Incoming


class SharedStorage(Connector):
    cached: ClassVar[bool] = True

    def arrange(self, asked: Asked, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            sequence.transfer = Filed(self, asked, sequence)


class Filed(Incoming):
    def __init__(self, connector: Connector, asked: Asked, sequence: Sequence) -> None:
        super().__init__(connector, asked, "")
        block = connector.config.block_size
        self._files = connector.fabric.files
        self._tokens = (sequence.tokens - 1) // block * block
        self._hash = text_hash(sequence.prompt[: self._tokens * BYTES_PER_TOKEN] + b"%d" % sequence.root)

    def arrives(self, cached: int) -> bool:
        return self._tokens > cached and self._hash in self._files

    async def found(self) -> bool:
        return not self.asked.is_lost

    def take(self) -> bool:
        return True

    def computed(self, sequence: Sequence) -> None:
        if self._tokens and not self.asked.is_lost:
            self._files.add(self._hash)
