"""What a process shares stays shared over a reload."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from proxy.cluster.messages import Packet, PacketKind, packet
from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.replica import Replica, new_id
from proxy.cluster.shared import Shared, SharedLimits, SharedQueue, SharedSessions, SharedSpeeds
from proxy.cluster.sharing import Replicated
from proxy.cluster.transport import Transport
from proxy.fleet.settings import PodSettings
from proxy.flowcontrol.capacity import SharedCaps
from proxy.settings import Settings, from_mapping

KEYS = {"apiKeys": [{"name": "team", "key": "secret", "limits": {"requestsPerMinute": 10}}]}
PLUGINS = [
    {"type": "approx-prefix-cache-producer"},
    {"type": "session-affinity-scorer"},
    {"type": "prefix-cache-scorer"},
    {"type": "latency-scorer"},
]
EVERYTHING = {
    "security": KEYS,
    "flowControl": {"maxConcurrent": 4},
    "scheduling": {"plugins": PLUGINS},
}


NOTHING = {"scheduling": {"plugins": [{"type": "queue-scorer"}]}}


class Process:
    def __init__(self, **sections: Any) -> None:
        self.app = Replicated(settings(**sections))

    def reload(self, **sections: Any) -> None:
        self.app._use(*self.app._build(settings(**sections)))

    @property
    def values(self) -> Sequence[Shared]:
        return self.app._replica.state.values

    @property
    def caps(self) -> SharedCaps:
        (queue,) = self.app._replica.state.of(SharedQueue)
        return queue.shared_caps

    def all(self, *kinds: type[Shared]) -> list[Shared]:
        return [value for value in self.values if isinstance(value, kinds)]


def settings(**sections: Any) -> Settings:
    return from_mapping({"replicas": {"store": "redis://nowhere"}, **sections})


OF_A_CONFIGURATION = SharedIndex, SharedLimits, SharedQueue, SharedSpeeds


def test_values_of_a_configuration_are_shared_while_it_has_them() -> None:
    process = Process(**NOTHING)
    assert process.all(*OF_A_CONFIGURATION) == []
    process.reload(**EVERYTHING)
    assert {type(value) for value in process.all(*OF_A_CONFIGURATION)} == set(OF_A_CONFIGURATION)
    assert len(process.all(SharedSessions)) == 2  # of the plugin, and stored responses
    process.reload(**NOTHING)
    assert process.all(*OF_A_CONFIGURATION) == []
    assert len(process.all(SharedSessions)) == 1


def test_a_value_that_stays_over_a_reload_keeps_what_shares_it() -> None:
    process = Process(**EVERYTHING)
    before = process.values
    larger = {"type": "approx-prefix-cache-producer", "parameters": {"maxBytes": "64MiB"}}
    process.reload(
        **{**EVERYTHING, "flowControl": {"maxConcurrent": 8}, "scheduling": {"plugins": [larger, *PLUGINS[1:]]}}
    )
    assert process.values == before
    (index,) = process.app._replica.state.of(SharedIndex)
    assert index.max_bytes == 64 << 20
    assert process.app._indexes() == [index]


def test_an_index_of_other_blocks_is_another_value() -> None:
    process = Process(**EVERYTHING)
    (index,) = process.app._replica.state.of(SharedIndex)
    larger = {"type": "approx-prefix-cache-producer", "parameters": {"blockSizeTokens": 128}}
    process.reload(**{**EVERYTHING, "scheduling": {"plugins": [larger, *PLUGINS[1:]]}})
    (other,) = process.app._replica.state.of(SharedIndex)
    assert (other is index, other._tag == index._tag) == (False, False)


def test_a_check_of_a_configuration_shares_nothing_of_it() -> None:
    process = Process(**NOTHING)
    before = process.values
    process.app.check(settings(**EVERYTHING))
    assert process.values == before


class Line(Transport):
    """Passes the packets of one process to the other, and keeps them."""

    def __init__(self, to: Replica) -> None:
        self._to = to
        self.packets: list[Packet] = []

    def publish(self, packet: Packet) -> None:
        self.packets.append(packet)
        if packet.to in (None, self._to.id):
            self._to.received(packet)

    async def end(self) -> None:
        return


async def test_loans_of_a_queue_that_a_reload_dropped_end_at_peers_when_another_reload_adds_it() -> None:
    one, two = Process(**EVERYTHING), Process(**EVERYTHING)
    here, there = one.app._replica, two.app._replica
    here.use(Line(there))
    there.use(Line(here))
    here.hello()
    there.hello()
    await asyncio.sleep(0.05)
    borrower, lender = two.caps, one.caps
    borrower.say(0, 1.0, ("requests ",))
    there.flush()
    lender.lend("requests ", 1, "requests ")
    lender.say(None)
    here.flush()
    assert (lender.part("requests ", 4), borrower.part("requests ", 4)) == (3, 5)
    borrower.say(None)
    there.flush()
    one.reload(**NOTHING)
    one.reload(**EVERYTHING)
    await asyncio.sleep(0.05)
    assert (one.caps.part("requests ", 4), borrower.part("requests ", 4)) == (4, 4)
    for each in (here, there):
        await each.close()


async def test_a_reload_sends_its_new_state_once_however_many_peers_there_are() -> None:
    process, peer = Process(**NOTHING), Process(**NOTHING)
    replica, line = process.app._replica, Line(peer.app._replica)
    replica.use(line)
    for number in range(1, 8):
        replica.received(packet(PacketKind.BEAT, new_id(number), 1, b""))
    await asyncio.sleep(0.05)
    line.packets.clear()
    process.reload(**EVERYTHING)
    await asyncio.sleep(0.05)
    sent = [packet.kind for packet in line.packets]
    assert (sent.count(PacketKind.ASK), sent.count(PacketKind.NEWS)) == (7, 1)
    assert PacketKind.STATE not in sent
    await replica.close()


def test_requests_of_other_hosts_do_not_run_here() -> None:
    app = Process(**NOTHING).app
    pod = app.fleet.add(PodSettings("http://pod:8000", name="pod"))
    app.ledger.elsewhere(pod, 3, 30)
    assert pod.load.requests == 3
    assert app.in_flight == 0
