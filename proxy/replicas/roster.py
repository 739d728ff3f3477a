"""Pods by a number that all processes have for a name: eight bytes, however long the names of a cluster are."""

from __future__ import annotations

from functools import lru_cache

from xxhash import xxh3_64_intdigest

from proxy.core.endpoint import Endpoint


@lru_cache(maxsize=1 << 16)
def pod_number(name: str) -> int:
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class Roster:
    """The pods that this process knows, as its fleet says."""

    def __init__(self) -> None:
        self._pods: dict[int, Endpoint] = {}
        self.get = self._pods.get

    def added(self, endpoint: Endpoint) -> None:
        self._pods[pod_number(endpoint.name)] = endpoint

    def removed(self, endpoint: Endpoint) -> None:
        number = pod_number(endpoint.name)
        if self._pods.get(number) is endpoint:
            del self._pods[number]
