"""All connectors, by the name that `SimConfig.connector` gives."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proxy.sim.transfer.connector import Connector
from proxy.sim.transfer.nixl import Nixl
from proxy.sim.transfer.p2p_nccl import P2pNccl
from proxy.sim.transfer.rooms import Mooncake, Sglang
from proxy.sim.transfer.shared_storage import SharedStorage

CONNECTORS: Mapping[str, type[Connector]] = MappingProxyType(
    {
        "": Connector,
        "nixl": Nixl,
        "shared-storage": SharedStorage,
        "mooncake": Mooncake,
        "sglang": Sglang,
        "p2p-nccl": P2pNccl,
    }
)
