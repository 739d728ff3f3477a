"""Hosts that know of each other over a real Redis: alone in their process, or with members behind a hub."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import orjson
import pytest

from proxy.cluster import redis_transport
from proxy.cluster.deployment import MOST_WAITING, Deployment, StoreConnection
from proxy.cluster.membership import peer_id
from proxy.cluster.messages import BROKER, VERSION, PacketKind, RecordKind, message, packet, record
from proxy.cluster.redis_transport import Lease, RedisConnection
from proxy.cluster.replica import new_id
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.shared import TURN, Who
from proxy.cluster.transport import Broker
from proxy.core.ports import SystemClock
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.replicas import bare_replica
from tests.helpers.cluster.store import Store, Wall, needs_redis, store
from tests.helpers.http.authority import Authority
from tests.helpers.patience import CLOCK
from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE, until
from tests.wire.cluster.test_bus import Member

pytestmark = needs_redis

LEASE, SHORT = 10.0, 1.5
"""Seconds. The short one is for tests that wait for its end; a busy machine must not make it end before."""


def settings(url: str, **given: Any) -> ReplicaSettings:
    return ReplicaSettings(**{"store": url, "lease": LEASE, **given})


class Proxy(Member):
    """A host by itself."""

    def __init__(self, wanted: ReplicaSettings, config: str = "a") -> None:
        super().__init__(lease=wanted.lease)
        self.config = config
        self.deployment = Deployment(
            wanted, SystemClock(), random.Random(1), Catalogue("test"), self.replica, lambda: self.config
        )
        self.series = self.deployment.series
        self.replica.join(self.deployment)

    @property
    def knows(self) -> int:
        return int(self.series.known.value)

    @property
    def remote(self) -> int:
        return self.pod.load.remote_requests


def are_connected(one: Proxy, two: Proxy) -> bool:
    return one.knows == two.knows == 1 and one.deployment.is_connected and two.deployment.is_connected


class Deployed:
    def __init__(self, stack: AsyncExitStack, redis: Store) -> None:
        self._stack = stack
        self.redis = redis

    async def join(self, url: str = "", **given: Any) -> Proxy:
        config = given.pop("config", "a")
        return await self.enter(Proxy(settings(url or self.redis.url, **given), config))

    async def enter(self, proxy: Proxy) -> Proxy:
        await self._stack.enter_async_context(proxy.deployment)
        self._stack.push_async_callback(proxy.replica.close)
        return proxy

    async def pair(self, **given: Any) -> tuple[Proxy, Proxy]:
        one, two = await self.join(**given), await self.join(**given)
        await until(lambda: are_connected(one, two))
        return one, two

    async def wall(self) -> Wall:
        return await self._stack.enter_async_context(Wall(self.redis.port))


@pytest.fixture
async def deployed(tmp_path: Path) -> AsyncIterator[Deployed]:
    async with store(tmp_path) as redis, AsyncExitStack() as stack:
        yield Deployed(stack, redis)


def vanish(proxy: Proxy) -> None:
    """As after kill -9: it says nothing any more, not even that."""
    proxy.deployment._connection = None
    for task in [*proxy.deployment._tasks._tasks, *proxy.replica._tasks._tasks]:
        task.cancel()


@pytest.mark.smoke
async def test_proxies_share_their_state(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    one.dispatch(2)
    one.remember([1, 2, 3])
    one.bindings.bind("resp-1", one.pod)
    one.shared_breakers.breaker_turned(one.pod, True)
    await until(lambda: two.pod.load.requests == two.remote == 2)
    await until(lambda: two.depth([1, 2, 3]) == 3 and two.knows_response and two.breakers == [("a", True)])
    assert one.remote == 0


async def test_ejection_reasons_are_local_to_a_host(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    one.own_ejections["a"] = ["ill"]
    one.ejections.changed()
    one.dispatch(1)
    await until(lambda: two.remote == 1)
    assert not any(two.peer_ejections.values())
    assert not one.replica._batch._records


async def test_a_suspended_host_does_not_consider_others_silent(deployed: Deployed) -> None:
    one, two = await deployed.pair(lease=SHORT)
    one.dispatch(2)
    await until(lambda: two.remote == 2)
    CLOCK.stand_still(2 * SHORT)
    for _ in range(20):
        await asyncio.sleep(SHORT / 20)
        assert two.knows == one.knows == 1
        assert two.remote == 2
    assert one.series.losses.value == two.series.losses.value == 0


async def test_a_new_host_receives_loads_and_index(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    one.dispatch(2)
    two.dispatch(3)
    one.remember([1, 2, 3])
    two.reserve([4, 5])
    one.bindings.bind("resp-1", one.pod)
    two.bindings.bind("resp-1", two.pod)
    await until(lambda: two.depth([1, 2, 3]) == 3 and one.depth([4, 5]) == 2)
    late = await deployed.join()
    await until(lambda: late.remote == 5)
    await until(lambda: late.depth([1, 2, 3]) == 3 and late.depth([4, 5]) == 2 and late.knows_response)


async def test_hosts_share_limits_with_live_hosts_and_trial_requests_one_at_a_time(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    await until(lambda: sorted([one.replica.place, two.replica.place]) == [(2, 0), (2, 1)])
    assert abs(one.shared_breakers.pause(one.pod) - two.shared_breakers.pause(two.pod)) == TURN
    one.shared_breakers.breaker_tried(one.pod)
    await until(lambda: two.tried == ["a"])
    await two.deployment.__aexit__(None, None, None)
    await until(lambda: one.replica.place == (1, 0))


async def test_a_silent_host_is_removed_after_its_lease(deployed: Deployed) -> None:
    one, two = await deployed.pair(lease=SHORT)
    one.dispatch(2)
    one.reserve([1, 2])
    await until(lambda: two.remote == 2 and two.depth([1, 2]) == 2)
    vanish(one)
    await until(lambda: two.remote == 0 and two.depth([1, 2]) == 0 and two.knows == 0)


async def test_a_host_that_stops_is_removed_at_once(deployed: Deployed) -> None:
    one = await deployed.join(lease=60.0)
    two = Proxy(settings(deployed.redis.url, lease=60.0))
    async with two.deployment:
        await until(lambda: one.deployment.status()["others"])
        two.dispatch(2)
        await until(lambda: one.remote == 2)
    await until(lambda: one.remote == 0 and not one.deployment.status()["others"])
    await two.replica.close()


async def test_without_the_store_each_host_continues_alone_and_recovers_with_an_empty_store(deployed: Deployed) -> None:
    one, two = await deployed.pair(lease=SHORT)
    one.dispatch(2)
    await until(lambda: two.remote == 2)
    deployed.redis.kill()
    await until(lambda: not one.deployment.is_connected and not two.deployment.is_connected)
    assert two.deployment.status()["store"] == "away"
    await until(lambda: two.remote == 0 and two.series.staleness.value > SHORT / 2)
    one.dispatch(1)
    two.dispatch(5)
    one.reserve([1, 2])
    await deployed.redis.start()
    await until(lambda: one.remote == 5 and two.remote == 3 and two.depth([1, 2]) == 2)
    assert (one.pod.load.requests, two.pod.load.requests) == (8, 8)
    await until(lambda: two.deployment.is_connected and two.series.up.value == 1)
    assert two.series.losses.value == 1
    one.dispatch(-3)
    await until(lambda: two.remote == 0)


async def test_a_disconnected_host_is_removed_and_its_late_packets_are_ignored(deployed: Deployed) -> None:
    wall = await deployed.wall()
    near, far = await deployed.join(lease=SHORT), await deployed.join(wall.url, lease=SHORT)
    await until(lambda: near.knows == far.knows == 1 and far.deployment.is_connected)
    far.dispatch(7)
    await until(lambda: near.remote == 7)
    wall.up()
    far.dispatch(4)
    near.dispatch(1)
    await asyncio.sleep(0.1)
    await until(lambda: near.remote == 0 and not far.deployment.is_connected)
    far.dispatch(-10)
    wall.down()
    await until(lambda: near.remote == 1 and far.remote == 1 and near.knows == 1)
    await asyncio.sleep(SHORT / 2)
    assert (near.remote, far.remote) == (1, 1)


async def test_a_hanging_store_is_detected_and_used_again_when_it_resumes(deployed: Deployed) -> None:
    one, two = await deployed.pair(lease=SHORT)
    deployed.redis.stop()
    await until(lambda: not one.deployment.is_connected and not two.deployment.is_connected)
    one.dispatch(3)
    deployed.redis.stop(goes_on=True)
    await until(lambda: two.remote == 3 and one.deployment.is_connected and two.deployment.is_connected)


async def test_a_store_that_stalls_for_longer_than_an_attempt_to_connect_is_used_again(
    deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_transport, "OPEN_TIMEOUT", 0.1)
    wall = await deployed.wall()
    one = await deployed.join(wall.url, lease=SHORT)
    await until(lambda: one.deployment.is_connected)
    wall.up()
    await until(lambda: "TimeoutError" in one.deployment.status().get("why", ""))
    wall.down()
    await until(lambda: one.deployment.is_connected)


async def test_no_request_waits_for_a_missing_store(deployed: Deployed) -> None:
    deployed.redis.kill()
    one = await deployed.join()
    one.dispatch(1)
    one.remember([1])
    await asyncio.sleep(0.2)
    assert one.deployment.status()["store"] == "away"
    await deployed.redis.start()
    two = await deployed.join()
    await until(lambda: two.remote == 1 and two.depth([1]) == 1)


async def test_a_host_that_missed_a_packet_requests_the_state(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    one.dispatch(2)
    await until(lambda: two.remote == 2)
    one.pod.charge(5, 0)  # not published
    one.replica._number += 1
    one.bindings.bind("later", one.pod)
    await until(lambda: two.remote == 7)
    assert two.series.missed.value == 1


async def test_packets_for_a_slow_store_are_dropped_and_requested_again(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    one.pod.charge(4, 0)  # not published
    deployed.redis.stop()
    connection = one.deployment._connection
    assert connection is not None
    while connection.waiting <= MOST_WAITING:
        one.replica.publish_to_all(RecordKind.SESSIONS, b"[" + b" " * 500_000 + b"]")
        await asyncio.sleep(0)
    waiting = connection.waiting
    one.replica.publish_to_all(RecordKind.SESSIONS, b"[" + b" " * 2000 + b"]")
    assert connection.waiting == waiting
    deployed.redis.stop(goes_on=True)
    await until(lambda: two.remote == 4)
    assert two.series.missed.value >= 1


async def test_hosts_report_other_hosts_with_another_configuration(deployed: Deployed) -> None:
    one, two = await deployed.join(name="one"), await deployed.join(name="two", config="b")
    await until(lambda: one.deployment.status()["others"] == [{"name": "two", "sameConfig": False}])
    await until(lambda: one.series.disagreeing.value == 1)
    two.config = "a"
    await until(lambda: one.series.disagreeing.value == 0)


async def test_a_host_of_unknown_identity_is_not_reported_as_disagreeing(deployed: Deployed) -> None:
    one, _ = await deployed.pair()
    one.deployment._received(message(packet(PacketKind.NEWS, b"stranger", 1, b"").packed))
    assert {"name": "", "sameConfig": None} in one.deployment.status()["others"]
    assert one.series.disagreeing.value == 0


async def test_hosts_with_another_prefix_are_independent(deployed: Deployed) -> None:
    one, two = await deployed.join(), await deployed.join(prefix="else")
    await until(lambda: one.deployment.is_connected and two.deployment.is_connected)
    one.dispatch(1)
    await asyncio.sleep(0.1)
    assert (two.remote, two.knows) == (0, 0)


async def test_staleness_is_the_delay_of_packets(deployed: Deployed) -> None:
    one, _ = await deployed.pair()
    await until(lambda: 0.0 < one.deployment.status()["staleness"] < LEASE)


async def test_another_host_cannot_reload_and_malformed_packets_are_ignored(deployed: Deployed) -> None:
    one, two = await deployed.pair()
    stranger = b"stranger"
    settings_of_a_supervisor = record(RecordKind.QUESTION, b"\1\0\0\0" + orjson.dumps(("reload", "{}")))
    async with RedisConnection(settings(deployed.redis.url), ("none",)) as line:
        for number, (kind, body) in enumerate(
            [
                (PacketKind.NEWS, settings_of_a_supervisor),
                (PacketKind.DIRECT, settings_of_a_supervisor),
                (PacketKind.NEWS, record(RecordKind.ROLL, b"[]")),
                (PacketKind.NEWS, record(RecordKind.HOSTS, b"[9,8,true]")),
                (PacketKind.NEWS, b"\x11\xff"),
                (PacketKind.BEAT, b"{]"),
                (PacketKind.BEAT, b"{}"),
                (PacketKind.ASK, b""),
            ],
            1,
        ):
            to = two.replica.id if kind in (PacketKind.DIRECT, PacketKind.ASK) else None
            line.publish("kvlane:all", message(packet(kind, stranger, number, body, to).packed))
        as_a_sibling = packet(PacketKind.NEWS, peer_id(two.replica.host, 5), 1, record(RecordKind.ROLL, b"[]"))
        line.publish("kvlane:all", message(as_a_sibling.packed))
        line.publish("kvlane:all", message(b"\x01"))
        line.publish("kvlane:all", message(b"\xff" * 40))
        await until(lambda: two.series.garbled.value == 2 and two.replica.garbled_of_hosts.value == 4)
    assert not two.replica.garbled.value
    assert not two.received
    assert two.replica.place[0] <= 3
    one.dispatch(1)
    await until(lambda: two.remote == 1)


async def test_hosts_of_another_version_are_ignored_and_logged_once(
    deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await deployed.pair()
    async with RedisConnection(settings(deployed.redis.url), ("none",)) as line:
        for number in range(1, 41):
            line.publish("kvlane:all", bytes([1, number]) + b"of a form that nobody knows")
        await until(lambda: one.series.foreign.value == two.series.foreign.value == 40)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2, "each of the two says it"
    assert f"with version 1 (this one: {VERSION})" in caplog.text
    assert (one.series.garbled.value, one.knows, two.knows) == (0, 1, 1)
    one.dispatch(1)
    await until(lambda: two.remote == 1)


async def test_a_turn_of_a_conversation_takes_few_bytes_without_batching() -> None:
    """Of 100 blocks and 5 more; each of its three moments has a packet of its own."""
    proxy = Proxy(settings("redis://nobody"))
    proxy.deployment._connection = cast(StoreConnection, Unread())
    chain = list(range(1, 206))
    sizes = []
    for end in range(100, 205, 5):
        proxy.dispatch(1)
        reservation = proxy.index.reserve((chain[:end],), proxy.pod, 100_000)
        sizes.append(_published(proxy))
        proxy.dispatch(0)
        sizes[-1] += _published(proxy)
        proxy.index.confirm(reservation)
        proxy.dispatch(-1)
        sizes[-1] += _published(proxy)
    assert sizes[0] > 800
    assert max(sizes[1:]) < 300


def _published(proxy: Proxy) -> int:
    before = proxy.deployment.series.sent.value
    proxy.replica._batch.flush()
    return int(proxy.deployment.series.sent.value - before)


class Unread:
    """A store without readers."""

    waiting = 0

    def publish(self, channel: str, message: bytes) -> None: ...


# Limits.


WHO: Who = ("key", "chat", "standard")
SPENT = (1.0, 10.0, 5.0, 5.0, 10.0)


@pytest.mark.parametrize(("policy", "others"), [("localShare", 2), ("open", 0)])
async def test_charges_during_a_disconnection_are_assumed(
    deployed: Deployed, policy: Literal["localShare", "open"], others: int
) -> None:
    """Two others are taken to do the same as this one, or nothing."""
    proxies = [await deployed.join(limits=policy) for _ in range(3)]
    await until(lambda: all(proxy.knows == 2 and proxy.deployment.is_connected for proxy in proxies))
    one = proxies[0]
    received: list[bytes] = []
    one.deployment._assumed._spent = received.append
    deployed.redis.kill()
    await until(lambda: not one.deployment.is_connected)
    one.replica.publish(RecordKind.SPENT, _spent(3, SPENT))
    expected = [record(RecordKind.SPENT, _spent(3 * others, tuple(others * each for each in SPENT)))] if others else []
    await until(lambda: received == expected)
    await deployed.redis.start()
    await until(lambda: one.deployment.is_connected)
    one.replica.publish(RecordKind.SPENT, _spent(3, SPENT))
    await asyncio.sleep(0.1)
    assert received == expected


def _spent(running: int, amounts: tuple[float, ...]) -> bytes:
    return orjson.dumps([(WHO, running, amounts)])


# Hosts with workers.


class HostOfMany:
    """A hub with two members, as a supervisor has it."""

    def __init__(self, wanted: ReplicaSettings) -> None:
        self.members: dict[int, Member] = {}
        self.vanished: list[int] = []
        self.lease = wanted.lease
        self.replica = bare_replica(new_id(BROKER), SystemClock(), lease=wanted.lease)
        self.broker = Broker(self.replica, self.vanished.append)
        self.deployment = Deployment(
            wanted,
            SystemClock(),
            random.Random(2),
            Catalogue("test"),
            self.replica,
            lambda: "a",
            self.broker.received,
        )
        self.broker.deployment = self.deployment

    async def join(self, number: int) -> Member:
        member = self.members[number] = Member(peer_id(self.broker.host, number), lease=self.lease)
        member.replica.publishes_lasting = number == 1
        ours, theirs = socket.socketpair()
        await self.broker.attach(number, ours)
        await member.replica.connect(theirs)
        return member

    async def leave(self, number: int) -> None:
        await self.members.pop(number).replica.close()


@asynccontextmanager
async def host_of_many(redis: Store, lease: float = LEASE) -> AsyncIterator[HostOfMany]:
    host = HostOfMany(settings(redis.url, lease=lease))
    async with host.deployment:
        yield host
    for number in list(host.members):
        await host.leave(number)
    await host.broker.end()
    await host.replica.close()


async def test_workers_of_a_host_and_a_process_of_another_share_state(deployed: Deployed) -> None:
    async with host_of_many(deployed.redis) as host:
        a, b = await host.join(1), await host.join(2)
        other = await deployed.join()
        await until(lambda: other.deployment.is_connected and host.deployment.is_connected)
        a.dispatch(1)
        b.dispatch(2)
        other.dispatch(4)
        a.remember([1, 2, 3])
        await until(lambda: other.remote == 3 and other.depth([1, 2, 3]) == 3)
        await until(lambda: (a.pod.load.requests, b.pod.load.requests) == (7, 7))
        assert host.replica.peers.hosts.keys() == {other.replica.host}
        await host.leave(1)
        await until(lambda: other.remote == 2 and b.pod.load.requests == 6)


async def test_a_late_worker_receives_the_state_of_other_hosts(deployed: Deployed) -> None:
    other = await deployed.join()
    other.dispatch(4)
    other.remember([1, 2, 3])
    async with host_of_many(deployed.redis) as host:
        await until(lambda: host.deployment.is_connected)
        first = await host.join(1)
        await until(lambda: first.pod.load.requests == 4 and first.depth([1, 2, 3]) == 3)
        second = await host.join(2)
        await until(lambda: second.pod.load.requests == 4 and second.depth([1, 2, 3]) == 3)
        first.dispatch(1)
        third = await deployed.join()
        await until(lambda: third.remote == 5 and third.depth([1, 2, 3]) == 3)


async def test_all_workers_remove_a_stopped_host(deployed: Deployed) -> None:
    async with host_of_many(deployed.redis, SHORT) as host:
        a = await host.join(1)
        other = await deployed.join(lease=SHORT)
        await until(lambda: other.deployment.is_connected and host.deployment.is_connected)
        other.dispatch(4)
        other.reserve([1, 2])
        await until(lambda: a.pod.load.requests == 4 and a.depth([1, 2]) == 2)
        vanish(other)
        await until(lambda: a.pod.load.requests == 0 and a.depth([1, 2]) == 0)
        await until(lambda: not host.replica.peers.hosts)


# Leases.


async def test_a_lease_has_one_holder_until_it_is_released(deployed: Deployed) -> None:
    one, two = (Lease(settings(deployed.redis.url), "autoscale", 60.0) for _ in range(2))
    assert await one.acquire()
    assert not await two.acquire()
    assert await one.acquire()
    await two.release()
    assert not await two.acquire()
    await one.release()
    assert await two.acquire()
    deployed.redis.kill()
    assert not await one.acquire()
    await one.release()
    await one.close()
    await two.close()
    await deployed.redis.start()


async def test_an_expired_lease_is_free(deployed: Deployed) -> None:
    brief, other = (Lease(settings(deployed.redis.url), "autoscale", seconds) for seconds in (0.3, 60.0))
    assert await brief.acquire()
    async with asyncio.timeout(PATIENCE):
        while not await other.acquire():
            await asyncio.sleep(0.05)
    assert not await brief.acquire()
    await brief.close()
    await other.close()


ACL = ["--user", "kvlane", "on", ">secret", "~kvlane:*", "&kvlane:*"]
ACL += ["-@all", "+@connection", "+@pubsub", "+set", "+eval", "+get", "+pexpire", "+del"]
"""As docs/replicas.md has it."""

CLUSTER = ["--cluster-enabled", "yes", "--cluster-port"]


async def test_a_store_with_an_acl_and_a_cluster_of_one_node(tmp_path: Path) -> None:
    async with store(tmp_path, *ACL, "+cluster", *CLUSTER, str(free_port())) as redis, AsyncExitStack() as stack:
        await _slots(redis)
        url = redis.url.replace("redis:", "redis+cluster:").removesuffix("/0")
        deployed = Deployed(stack, redis)
        one = await deployed.join(url, username="kvlane", password="secret")
        two = await deployed.join(url, username="kvlane", password="secret")
        await until(lambda: one.knows == two.knows == 1)
        one.dispatch(1)
        await until(lambda: two.remote == 1)
        lease = Lease(settings(url, username="kvlane", password="secret"), "x", 1.0)
        assert await lease.acquire()
        await lease.close()
        refused = await deployed.join(url, username="kvlane", password="wrong")
        await until(lambda: "invalid username" in refused.deployment.status().get("why", ""))


async def test_the_documented_acl_is_sufficient(tmp_path: Path) -> None:
    async with store(tmp_path, *ACL) as redis, AsyncExitStack() as stack:
        deployed = Deployed(stack, redis)
        one, two = await deployed.pair(username="kvlane", password="secret")
        one.dispatch(1)
        await until(lambda: two.remote == 1)
        lease, other = (Lease(settings(redis.url, username="kvlane", password="secret"), "x", 30.0) for _ in range(2))
        assert [await lease.acquire(), await other.acquire(), await lease.acquire()] == [True, False, True]
        await lease.release()
        assert await other.acquire()
        await lease.close()
        await other.close()
        elsewhere = await deployed.join(username="kvlane", password="secret", prefix="else")
        await until(lambda: "NoPermission" in elsewhere.deployment.status().get("why", ""))


async def _slots(redis: Store) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
    writer.write(b"CLUSTER ADDSLOTSRANGE 0 16383\r\n")
    assert await reader.readline() == b"+OK\r\n"
    while True:
        writer.write(b"CLUSTER INFO\r\n")
        if b"cluster_state:ok" in await reader.read(4096):
            break
        await asyncio.sleep(0.05)
    writer.close()


async def test_sentinels_name_the_master(deployed: Deployed, tmp_path: Path) -> None:
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    watched = f"sentinel monitor chat 127.0.0.1 {deployed.redis.port} 1\n"
    conf.write_text(f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel resolve-hostnames yes\n{watched}")
    sentinel = await asyncio.create_subprocess_exec(
        "redis-server", str(conf), "--sentinel", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        one = await deployed.join(f"redis+sentinel://127.0.0.1:{port},127.0.0.1:{free_port()}/chat")
        two = await deployed.join()
        await until(lambda: one.knows == two.knows == 1)
        one.dispatch(1)
        await until(lambda: two.remote == 1)
    finally:
        sentinel.kill()
        await sentinel.wait()


async def test_sentinels_with_tls_and_their_own_password(tmp_path: Path) -> None:
    authority, ports = Authority(tmp_path), (free_port(), free_port())
    own = str(authority.issue("redis"))
    files = ("--tls-cert-file", own, "--tls-key-file", own, "--tls-ca-cert-file", str(authority.file))
    tls = (*files, "--tls-auth-clients", "no", "--tls-replication", "yes", "--protected-mode", "no")
    master = ("--tls-port", str(ports[0]), *tls, "--requirepass", "of-the-store")
    conf = tmp_path / "sentinel.conf"
    conf.write_text(
        f"port 0\nbind 127.0.0.1\ndir {tmp_path}\nrequirepass of-sentinels\n"
        f"sentinel monitor chat 127.0.0.1 {ports[0]} 1\nsentinel auth-pass chat of-the-store\n"
    )
    watching = ("redis-server", str(conf), "--sentinel", "--tls-port", str(ports[1]), *tls)
    async with store(tmp_path, *master) as redis, AsyncExitStack() as stack:
        sentinel = await asyncio.create_subprocess_exec(*watching, stdout=asyncio.subprocess.DEVNULL)
        try:
            deployed = Deployed(stack, redis)
            url = f"rediss+sentinel://127.0.0.1:{free_port()},127.0.0.1:{ports[1]}/chat?ssl_ca_certs={authority.file}"
            given = {"password": "of-the-store", "sentinel_password": "of-sentinels"}
            one, two = await deployed.join(url, **given), await deployed.join(url, **given)
            await until(lambda: one.knows == two.knows == 1)
            lease = Lease(settings(url, **given), "x", 30.0)
            async with asyncio.timeout(PATIENCE):
                while not await lease.acquire():  # a handshake may take longer than it waits
                    pass
            await lease.close()
            refused = await deployed.join(url, password="of-the-store")
            await until(lambda: "No master found for 'chat'" in refused.deployment.status().get("why", ""))
            assert "object at" not in refused.deployment.status()["why"]
        finally:
            sentinel.kill()
            await sentinel.wait()


async def test_a_tls_store_with_a_valid_certificate_is_trusted(tmp_path: Path) -> None:
    authority, port = Authority(tmp_path), free_port()
    own = str(authority.issue("redis"))
    files = ("--tls-cert-file", own, "--tls-key-file", own, "--tls-ca-cert-file", str(authority.file))
    tls = ("--tls-port", str(port), *files, "--tls-auth-clients", "no")
    async with store(tmp_path, *tls) as redis, AsyncExitStack() as stack:
        deployed = Deployed(stack, redis)
        url = f"rediss://127.0.0.1:{port}"
        one = await deployed.join(f"{url}?ssl_ca_certs={authority.file}")
        two = await deployed.join(f"{url}?ssl_ca_certs={authority.file}")
        await until(lambda: one.knows == two.knows == 1)
        one.dispatch(1)
        await until(lambda: two.remote == 1)
        wary = await deployed.join(url)
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in wary.deployment.status().get("why", ""))
