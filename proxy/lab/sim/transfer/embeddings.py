"""How the embeddings of images and the like get from an encode pod to others: by a common directory, as with vLLM's
ECExampleConnector, or from the encode pod itself, as its answer says (`ec_transfer_params`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Any

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.sequence import Sequence, Transfer
from proxy.lab.sim.transfer.fabric import Fabric

TOKENS = 256
"""That one of them has."""


class Embeddings:
    """Those of one pod. `close` when it has died."""

    def __init__(self, config: SimConfig, fabric: Fabric, where: Callable[[], tuple[str, int]]) -> None:
        self._named = config.ec_connector == "nixl"
        self._fabric = fabric
        self._where = where

    def keep(self, sequence: Sequence, *, is_lost: bool) -> None:
        """When they are made."""
        if self._named:
            kept = self._fabric.encoders.setdefault(self._where(), set())
        else:
            kept = self._fabric.embeddings
        if not is_lost:
            sequence.transfer = _Kept(kept)

    def missing(self, media: Items[int], body: Mapping[str, Any]) -> tuple[int, ...]:
        """Those that the request does not say where to fetch."""
        params = body.get("ec_transfer_params")
        if not isinstance(params, dict):
            return tuple(media)
        return tuple(one for one in media if not self._is_named(one, params.get(_digest(one))))

    def params(self, sequences: Items[Sequence]) -> dict[str, Any] | None:
        """What the answer of an encode pod says to the next one."""
        media = [one for sequence in sequences for one in sequence.media if isinstance(sequence.transfer, _Kept)]
        if not self._named or not media:
            return None
        host, port = self._where()
        where = {"do_remote_encode": True, "num_encoder_tokens": TOKENS, "remote_host": host, "remote_port": port}
        return {_digest(one): where for one in media}

    def close(self) -> None:
        self._fabric.encoders.pop(self._where(), None)

    def _is_named(self, one: int, where: Any) -> bool:
        if not isinstance(where, dict):
            return False
        return one in self._fabric.encoders.get((where.get("remote_host"), where.get("remote_port")), ())


class _Kept(Transfer):
    def __init__(self, kept: set[int]) -> None:
        self._kept = kept

    def computed(self, sequence: Sequence) -> None:
        self._kept.update(sequence.media)


def _digest(one: int) -> str:
    return f"{one:016x}"
