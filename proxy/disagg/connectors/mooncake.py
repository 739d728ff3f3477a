"""vLLM's MooncakeConnector: both pods get the id of the transfer, and the decode pod asks the bootstrap server of the
prefill pod for its blocks.

The server also knows the id of the prefill pod's engine; where it serves several ranks, the label kvlane/engine-id
names it.
"""

from __future__ import annotations

from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random
from proxy.disagg.connector import Connector, Split, host_of, only_once, port_of

BOOTSTRAP_PORT = 8998


class Mooncake(Connector):
    name: ClassVar[str] = "mooncake"
    at_once: ClassVar[bool] = True

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        transfer = {"transfer_id": f"xfer-{only_once(request_id, random)}"}
        away = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{host_of(prefill)}:{port_of(prefill, BOOTSTRAP_PORT)}",
            "remote_engine_id": _engine_id(prefill),
        }
        here = {"do_remote_decode": True, "do_remote_prefill": False}
        return Split({"kv_transfer_params": {**here, **transfer}}, {"kv_transfer_params": {**away, **transfer}})


def _engine_id(prefill: Endpoint) -> str:
    """vLLM appends the data-parallel rank to the id of the engine."""
    engine_id = prefill.labels.get("kvlane/engine-id", "")
    return engine_id if not engine_id or prefill.rank is None else f"{engine_id}_dp{prefill.rank}"
