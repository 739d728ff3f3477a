"""A prefix index that several processes keep alike: each says what it reserves, settles and forgets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from struct import Struct
from struct import error as StructError
from zlib import crc32

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.prefix.depth import DEPTHS
from proxy.prefix.hashing import Chain
from proxy.prefix.index import PrefixIndex
from proxy.prefix.reservation import Reservation
from proxy.replicas.journal import Journal
from proxy.replicas.wire import Garbled, Kind

JOURNAL_BYTES = 4 * 1024 * 1024
"""Eight bytes are a hash: 130,000 tokens in blocks of 64 take 1.8 KB."""

NEAR = 24
"""Hashes before its end within which a prompt is looked for that another one goes on from: a turn of 1,500 tokens."""

ANEW = 60.0
"""Seconds after which prompts are told as a whole again, for those who have lost the one that they go on from."""

Tell = Callable[[Kind, bytes], None]
Find = Callable[[str], Endpoint | None]

_RESERVE = Struct("<IIQH")
"""Index, number of the reservation, capacity, length of the pod's name; the name follows, then the chains."""

_SETTLE = Struct("<II?")
_POD = Struct("<IQH")
"""As a reservation, without a number."""

_TAG = Struct("<I")
_LENGTH = Struct("<I")


def index_tag(name: str, block_tokens: int) -> int:
    """What processes call an index that they share; an index of another configuration is not meant."""
    return crc32(f"{block_tokens}:{name}".encode())


class SharedIndex(PrefixIndex):
    """`tell(kind, body)` is called for everything that this process does to it; `take` does what a peer did.

    Reservations of a peer are numbered by the peer. They pin here what they pin there, until they are settled, or the
    peer is gone.
    """

    def __init__(
        self, clock: Clock, max_siblings: int, ttl: float, max_bytes: float, *, tag: int, tell: Tell, find: Find
    ) -> None:
        """`find` gives the living pod of a name."""
        super().__init__(clock, max_siblings, ttl, max_bytes)
        self._tag = tag
        self._tell = tell
        self._find = find
        self._numbers = count(1)
        self._own: dict[Reservation, tuple[int, bytes]] = {}
        self._of_peers: dict[int, dict[int, tuple[Reservation, bytes]]] = {}
        self._journal = Journal(JOURNAL_BYTES)
        self._ends: dict[str, dict[bytes, int]] = {}
        """By pod, of the prompts that were told and confirmed, which all others know: last hash, and where it ends."""
        self._now = clock.now
        self._anew_at = clock.now() + ANEW

    # What this process does.

    def reserve(self, chains: Sequence[Chain], endpoint: Endpoint, capacity: int) -> Reservation:
        reservation = super().reserve(chains, endpoint, capacity)
        packed, known = self._going_on(reservation) or (self._pack(reservation), 0)
        if packed:
            self._own[reservation] = next(self._numbers) & 0xFFFFFFFF, packed
            if known:
                self._tell(Kind.RESERVE_ON, self._reserve_body(reservation, packed[known - 8 :]))
            else:
                self._tell(Kind.RESERVE, self._reserve_body(reservation, packed))
        return reservation

    def settle(self, reservation: Reservation, computed: bool) -> None:
        super().settle(reservation, computed)
        self._settled(reservation, computed)

    def lost(self, endpoint: Endpoint) -> None:
        super().lost(endpoint)
        self._tell(Kind.FORGET, self._pod_body(endpoint.name, 0))

    def forget(self, endpoint: Endpoint) -> None:
        super().forget(endpoint)
        self._journal.forget(endpoint.name)
        self._ends.clear()

    # What a process that joins must be told.

    def begin_anew(self) -> None:
        """Somebody may not know what all others do."""
        self._ends.clear()
        self._anew_at = self._now() + ANEW

    def in_flight(self) -> list[bytes]:
        """Bodies of RESERVE: all that is not settled."""
        return [self._reserve_body(reservation, packed) for reservation, (_, packed) in self._own.items()]

    def memory(self, most_bytes: int = JOURNAL_BYTES) -> Iterator[bytes]:
        """Bodies of MEMORY: what was confirmed last, oldest first."""
        for pod, chains in self._journal.latest(most_bytes):
            endpoint = self._find(pod)
            if endpoint is not None and endpoint in self._pods:
                yield self._pod_body(pod, self._pods[endpoint].capacity) + chains

    # What a peer did.

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then. What is not of this index is passed over."""
        try:
            if _TAG.unpack_from(body)[0] == self._tag:
                _TAKE[kind](self, peer, body)
        except (StructError, ValueError):
            raise Garbled(f"{kind.name} that is none") from None

    def vanished(self, peer: int) -> None:
        """Its answers, if there are any, reach nobody."""
        for reservation, _ in self._of_peers.pop(peer, {}).values():
            super().settle(reservation, False)

    def _take_reserve(self, peer: int, body: bytes) -> None:
        _, number, capacity, size = _RESERVE.unpack_from(body)
        endpoint, packed = self._pod_and_chains(body, _RESERVE.size, size)
        self._reserve_of(peer, number, capacity, endpoint, packed)

    def _take_reserve_on(self, peer: int, body: bytes) -> None:
        """If what it goes on from is not known here, nobody is told: it will be, when it is told anew."""
        _, number, capacity, size = _RESERVE.unpack_from(body)
        endpoint, rest = self._pod_and_chains(body, _RESERVE.size, size)
        if len(rest) < 8 or len(rest) % 8:
            raise Garbled("the rest of a chain is cut off")
        known = None if endpoint is None else self._journal.get(endpoint.name, rest[:8])
        if known is not None and _is_one(known):
            self._reserve_of(peer, number, capacity, endpoint, _longer(known, rest[8:]))

    def _reserve_of(self, peer: int, number: int, capacity: int, endpoint: Endpoint | None, packed: bytes) -> None:
        chains = _unpack(packed)
        if endpoint is None:
            return
        of_peer = self._of_peers.setdefault(peer, {})
        if number in of_peer:
            super().settle(of_peer.pop(number)[0], False)
        of_peer[number] = super().reserve(chains, endpoint, capacity), packed

    def _take_settle(self, peer: int, body: bytes) -> None:
        _, number, computed = _SETTLE.unpack(body)
        reservation, packed = self._of_peers.get(peer, {}).pop(number, (None, b""))
        if reservation is None:
            return
        super().settle(reservation, computed)
        if computed:
            self._keep(reservation, packed)

    def _take_forget(self, peer: int, body: bytes) -> None:
        endpoint, _ = self._pod_and_chains(body, _POD.size, _POD.unpack_from(body)[2])
        if endpoint is not None:
            self.forget(endpoint)

    def _take_memory(self, peer: int, body: bytes) -> None:
        _, capacity, size = _POD.unpack_from(body)
        endpoint, packed = self._pod_and_chains(body, _POD.size, size)
        chains = _unpack(packed)
        if endpoint is not None:
            reservation = super().reserve(chains, endpoint, capacity)
            super().settle(reservation, True)
            self._keep(reservation, packed)

    def _settled(self, reservation: Reservation, computed: bool) -> None:
        number, packed = self._own.pop(reservation, (0, b""))
        if not number:
            return
        self._tell(Kind.SETTLE, _SETTLE.pack(self._tag, number, computed))
        if computed:
            self._keep(reservation, packed)
            if len(reservation.spans) == 1:
                self._ends.setdefault(reservation.pod.endpoint.name, {})[packed[-8:]] = len(packed)

    def _going_on(self, reservation: Reservation) -> tuple[bytes, int] | None:
        """Packed, and up to which byte all others know it: of a prompt that goes on where one of its segments ends, so
        that only what is behind that is packed anew. None of any other, and of several chains."""
        if self._now() >= self._anew_at:
            self.begin_anew()
        pod, spans = reservation.pod.endpoint.name, reservation.spans
        ends = self._ends.get(pod)
        if ends is None or len(spans) != 1:
            return None
        ((_, length, _, way),) = spans
        end, rest = _LENGTH.size + 8 * length, b""
        for at in range(len(way) - 1, 0, -1):
            rest = way[at].segment.hashes.tobytes() + rest
            if len(rest) > 8 * NEAR:
                return None
            last = way[at - 1].segment.hashes[-1:].tobytes()
            if ends.get(last) == end - len(rest):
                known = self._journal.get(pod, last) or b""
                is_it = len(known) == end - len(rest) and _is_one(known)
                return (_longer(known, rest), len(known)) if is_it else None
        return None

    def _keep(self, reservation: Reservation, packed: bytes) -> None:
        if packed and not reservation.pod.retired:
            self._journal.add(reservation.pod.endpoint.name, packed)

    def _pack(self, reservation: Reservation) -> bytes:
        """Copied from the segments, which are packed already: a list of 512 integers would take 10 us. The way of a
        reservation that was just made is whole, unless a second chain has cut it."""
        parts: list[bytes] = []
        for hashes, length, _, way in reservation.spans:
            if len(reservation.spans) > 1:
                way = self._forest.way(reservation.pod, hashes, length)
            parts.append(_LENGTH.pack(length))
            parts.extend([holding.segment.hashes.tobytes() for holding in way])
        return b"".join(parts)

    def _reserve_body(self, reservation: Reservation, packed: bytes) -> bytes:
        number, _ = self._own[reservation]
        pod = reservation.pod
        name = pod.endpoint.name.encode()
        return _RESERVE.pack(self._tag, number, max(0, pod.capacity), len(name)) + name + packed

    def _pod_body(self, name: str, capacity: int) -> bytes:
        encoded = name.encode()
        return _POD.pack(self._tag, max(0, capacity), len(encoded)) + encoded

    def _pod_and_chains(self, body: bytes, at: int, size: int) -> tuple[Endpoint | None, bytes]:
        if at + size > len(body):
            raise Garbled("a pod's name is cut off")
        return self._find(body[at : at + size].decode()), body[at + size :]


_TAKE: dict[Kind, Callable[[SharedIndex, int, bytes], None]] = {
    Kind.RESERVE: SharedIndex._take_reserve,
    Kind.RESERVE_ON: SharedIndex._take_reserve_on,
    Kind.SETTLE: SharedIndex._take_settle,
    Kind.FORGET: SharedIndex._take_forget,
    Kind.MEMORY: SharedIndex._take_memory,
}


def _is_one(packed: bytes) -> bool:
    """Whether these are the hashes of one chain."""
    return bool(_LENGTH.unpack_from(packed)[0] * 8 + _LENGTH.size == len(packed))


def _longer(packed: bytes, hashes: bytes) -> bytes:
    return _LENGTH.pack((len(packed) + len(hashes) - _LENGTH.size) // 8) + packed[_LENGTH.size :] + hashes


def _unpack(packed: bytes) -> list[Chain]:
    chains: list[Chain] = []
    at = 0
    while at < len(packed):
        (hashes,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size + 8 * hashes
        if at > len(packed) or hashes >= len(DEPTHS):
            raise Garbled("a chain is cut off, or longer than any")
        chains.append(array("Q", packed[at - 8 * hashes : at]).tolist())
    return chains
