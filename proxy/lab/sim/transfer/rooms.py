"""Connectors whose two requests are sent at the same time and find each other: by a transfer id (vLLM's Mooncake) or in
a room of a bootstrap server (SGLang).

The decode pod waits as long as the prefill pod lives and computes, but not long for one that does not come.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

from proxy.lab.sim.sequence import Sequence
from proxy.lab.sim.transfer.connector import Asked, Connector, Incoming, NotServed, Outgoing, TransferFailed


class Mooncake(Connector):
    """Requests without a transfer id are served as by any pod."""

    def arrange(self, asked: Asked, sequences: Items[Sequence]) -> None:
        params = asked.params()
        if not params.get("transfer_id"):
            return
        for index, sequence in enumerate(sequences):
            key = f"mooncake {params['transfer_id']} {index}"
            if params.get("do_remote_decode"):
                sequence.transfer = Outgoing(self, self.hold(key, sequence), is_lost=asked.is_lost)
            elif params.get("do_remote_prefill"):
                sequence.transfer = Incoming(self, asked, key, self.scaled(self.config.transfer.failure))


class Sglang(Connector):
    """A pod with a role takes no request without a room, and a prefill pod's answer ends when its cache was fetched."""

    def arrange(self, asked: Asked, sequences: Items[Sequence]) -> None:
        if self.config.role not in ("prefill", "decode"):
            return
        for sequence, room in zip(sequences, _rooms(asked.body, len(sequences)), strict=True):
            key = f"sglang {room}"
            if self.config.role == "prefill":
                sequence.transfer = Fetched(self, self.hold(key, sequence), is_lost=asked.is_lost)
            else:
                sequence.transfer = Incoming(self, asked, key, self.scaled(self.config.transfer.failure))


class Fetched(Outgoing):
    async def done(self) -> None:
        if not await self.holding.ended():
            raise TransferFailed("KVTransferError: the decode instance did not come for its KV cache")


def _rooms(body: Mapping[str, Any], count: int) -> list[int]:
    """One for each sequence: where there are several, the request has a list."""
    given = body.get("bootstrap_room")
    rooms = [room for room in (given if isinstance(given, list) else [given]) if isinstance(room, int)]
    if len(rooms) != count:
        raise NotServed("Invalid request: Disaggregated request received without bootstrap room id.")
    return rooms
