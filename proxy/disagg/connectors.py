"""All connectors, by the name that `disaggregation.connector` gives."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.disagg.connector import Connector
from proxy.disagg.mooncake import Mooncake
from proxy.disagg.nixl import Nixl
from proxy.disagg.p2p_nccl import P2pNccl
from proxy.disagg.sglang import Sglang
from proxy.disagg.shared_storage import SharedStorage

CONNECTORS: Mapping[str, type[Connector]] = {
    connector.name: connector for connector in (Nixl, SharedStorage, Mooncake, Sglang, P2pNccl)
}
