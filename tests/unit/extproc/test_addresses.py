"""Where pods are, as gateways name them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from aiohappyeyeballs import AddrInfoType

from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConnectFailed
from proxy.core.ports import ManualClock
from proxy.extproc.addresses import KEPT, Addresses


class Names:
    """Responds with the next of some addresses to each query."""

    def __init__(self, *found: str) -> None:
        self.found = list(found)
        self.queries: list[str] = []

    async def resolve(self, host: str, port: int) -> Sequence[AddrInfoType]:
        self.queries.append(host)
        if not self.found:
            raise OSError("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.found.pop(0), port))]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00::1]:8000/engine", "[fd00::1]:8000"),
    ],
)
async def test_an_address_is_read_from_the_url(url: str, address: str) -> None:
    names, pod = Names(), Endpoint("a", url)
    addresses = Addresses(ManualClock(), names.resolve)
    assert await addresses.of(pod) == address
    assert addresses.known(pod) == {address}
    assert addresses.at(address, [Endpoint("b", "http://10.0.0.9:1"), pod]) is pod
    assert not names.queries


async def test_a_host_name_is_resolved_again_after_a_time() -> None:
    clock, names, pod = ManualClock(), Names("10.0.0.1", "10.0.0.2"), Endpoint("a", "http://vllm-0:8000")
    addresses = Addresses(clock, names.resolve)
    assert addresses.known(pod) == {"vllm-0:8000"}
    assert [await addresses.of(pod) for _ in range(2)] == ["10.0.0.1:8000"] * 2
    assert addresses.known(pod) == {"vllm-0:8000", "10.0.0.1:8000"}
    clock.advance(KEPT + 1)
    assert await addresses.of(pod) == "10.0.0.2:8000"
    assert names.queries == ["vllm-0"] * 2


async def test_an_unresolvable_name_is_a_pod_without_a_connection() -> None:
    with pytest.raises(ConnectFailed, match="no such name"):
        await Addresses(ManualClock(), Names().resolve).of(Endpoint("a", "http://nowhere:8000"))
