"""KV events of a simulated engine, published over ZeroMQ as vLLM publishes them.

Each data-parallel rank has its own socket: rank r publishes on the configured port plus r. A message has three frames:
the topic, the number of the message (8 bytes, big-endian, from 0), and the MessagePack array [time, events, rank].
Missed messages cannot be requested again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.lab.sim.config import SimConfig

MEDIUM = "GPU"


class KvPublisher:
    """The events of one rank: collected during a step, published by `publish`. Raises ImportError without pyzmq and
    msgpack, and OSError if the port is taken."""

    def __init__(self, config: SimConfig, rank: int, host: str) -> None:
        import msgpack  # not needed by pods without events
        import zmq

        self._pack = msgpack.packb
        self._rank = rank
        self._block_size = config.block_size
        self._topic = f"kv@pod@{config.model}".encode()
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        try:
            self._socket.bind(f"tcp://{host}:{config.kv_events_port + rank}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"port {config.kv_events_port + rank} for KV events: {error.strerror}") from None

    def stored(self, block: int, parent: int | None, tokens: Sequence[int]) -> None:
        """Record a new block after `parent`, with the ids of its tokens."""
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [block],
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": self._block_size,
                "medium": MEDIUM,
            }
        )

    def removed(self, blocks: Sequence[int]) -> None:
        self._events.extend({"type": "BlockRemoved", "block_hashes": [block], "medium": MEDIUM} for block in blocks)

    def cleared(self) -> None:
        self._events.append({"type": "AllBlocksCleared"})

    def publish(self, wall: float) -> None:
        if not self._events:
            return
        payload = self._pack([wall, self._events, self._rank])
        self._socket.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
        self._number += 1
        self._events = []

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
