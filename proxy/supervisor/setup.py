"""What a worker is given when it starts."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class Setup:
    """`given` is the configuration as it was checked, whatever became of the file since. `worker` is a number that no
    other worker ever had. File descriptors are inherited: of the bus, and of listening sockets, which are bound."""

    given: Mapping[str, Any]
    worker: int
    bus: int
    listeners: tuple[int, ...]
    directory: str
    workers: int = 1
    """How many there are."""
    seat: int = 0
    """Which of them this one is; its successor has the same."""
    for_gateways: tuple[int, ...] = ()
    """Listening sockets too, if gateways may ask."""

    @property
    def metrics_path(self) -> str:
        """Of the unix socket with the worker's own exposition."""
        return f"{self.directory}/worker-{self.worker}.sock"

    @property
    def log_lock_path(self) -> str:
        return f"{self.directory}/access-log.lock"

    def packed(self) -> bytes:
        """Pickled: between a process and its child there is nobody."""
        return pickle.dumps(self)

    @staticmethod
    def read(stream: BinaryIO) -> Setup:
        setup: Setup = pickle.load(stream)
        return setup
