"""All connectors, by the name that `SimConfig.connector` gives."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from proxy.lab.sim.transfer.connector import Connector
from proxy.lab.sim.transfer.nixl import Nixl
from proxy.lab.sim.transfer.p2p_nccl import P2pNccl
from proxy.lab.sim.transfer.rooms import Mooncake, Sglang
from proxy.lab.sim.transfer.shared_storage import SharedStorage

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
