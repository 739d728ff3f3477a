"""A prefix index that several processes keep alike."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from struct import Struct
from struct import error as StructError
from sys import byteorder
from zlib import crc32

from proxy.cluster.messages import Garbled, Kind, longs, read_longs, read_words, record, words
from proxy.cluster.shared import Records, Shared, pod_number
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.prefix.forest import Holding, PodMemory, Reservation
from proxy.prefix.hashing import DEPTHS, Chain
from proxy.prefix.index import PrefixIndex

NEAR = 3
"""Segments before the end of a prompt at whose ends one is looked for that it goes on from."""

Key = tuple[int, int]
"""The pod's number, and the last hash of a chain."""


class Journal:
    """Packed chains. One that is confirmed again is moved to the end and not kept twice."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._entries: dict[Key, bytes] = {}
        self.known: dict[Key, bytes] = {}
        """Those of them that all processes were told of since `begin_anew`; to be looked at."""

    def add(self, key: Key, chain: bytes, all_know: bool) -> None:
        self.add_all({key: chain}, all_know)

    def add_all(self, chains: dict[Key, bytes], all_know: bool) -> None:
        """On the hot path, so nothing is done one by one."""
        entries = self._entries
        self._drop(entries.keys() & chains.keys())
        entries.update(chains)
        self._size += sum(map(len, chains.values()))
        if all_know:
            self.known.update(chains)
        if self._size > self._most:
            self._shrink()

    def get(self, key: Key) -> bytes | None:
        return self._entries.get(key)

    def nearest(self, pod: int, chain: Chain, length: int, at: int, way: Sequence[Holding]) -> bytes:
        """What all processes know of a span whose first `at` hashes the pod has: `known` has the chain that ends there
        if a turn goes on from another one; else one is looked for that ends where one of the last segments does."""
        end = length
        for holding in way[: -NEAR - 1 : -1]:
            end -= len(holding.segment.hashes)
            if 0 < end < at:
                found = self.known.get((pod, chain[end - 1]))
                if found is not None and len(found) == 8 * end:
                    return found
        return b""

    def begin_anew(self) -> None:
        """From now on nobody is taken to know anything that was told before."""
        self.known.clear()

    def forget(self, pod: int) -> None:
        self._drop([key for key in self._entries if key[0] == pod])

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """A copy of the moment, in the order of their last confirmation."""
        return iter([(pod, chain) for (pod, _), chain in self._entries.items()])

    def latest(self, most_bytes: int) -> list[tuple[int, bytes]]:
        """As much of its end as fits."""
        found: list[tuple[int, bytes]] = []
        for (pod, _), chain in reversed(self._entries.items()):
            most_bytes -= len(chain)
            if most_bytes < 0:
                break
            found.append((pod, chain))
        return found[::-1]

    @property
    def size(self) -> int:
        return self._size

    def _shrink(self) -> None:
        """By a sixteenth more than it has to: a dictionary whose first entries go takes a while to find the next.
        Others do so at other moments, so they are not taken to know what would go next."""
        part = self._most // 16
        left, oldest = self._size, list[Key]()
        for key, chain in self._entries.items():
            if left <= self._most - 2 * part:
                break
            if left > self._most - part:
                oldest.append(key)
            else:
                self.known.pop(key, None)
            left -= len(chain)
        self._drop(oldest)

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._size -= len(self._entries.pop(key))
            self.known.pop(key, None)


_HEAD = Struct("<IIIIII")
"""Tag of the index, and how many there are: settled, reserved, pods, hashes, settled at last."""


@dataclass(slots=True)
class Moves:
    """First some are settled that were reserved in earlier batches, then chains are reserved, then some of these are
    settled. Lives for a batch.

    `settled` and `settled_last` are twice the number of a reservation, and 1 if the pod has computed it. Of each chain
    that is reserved there are three numbers: twice that of the reservation, and 1 if it goes on from a chain that all
    know, whose last hash is then the first of these; which of `pods` it is on; how many of `hashes`, which come in any
    pieces. A pod is its number, and its capacity in blocks.
    """

    settled: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    pods: list[tuple[int, int]] = field(default_factory=list)
    settled_last: list[int] = field(default_factory=list)

    def packed(self, tag: int) -> bytes:
        return packed_moves(tag, self.settled, self.reserved, self.hashes, self.pods, self.settled_last)

    @staticmethod
    def read(body: bytes) -> Moves:
        """Raises Garbled."""
        try:
            _, settled, reserved, pods, hashes, last = _HEAD.unpack_from(body)
        except StructError:
            raise Garbled("the head of moves is cut off") from None
        at = _HEAD.size + 8 * hashes
        numbers = read_longs(body, at, pods)
        found = read_words(body, at + 8 * pods, settled + reserved + pods + last)
        rest = settled + reserved
        capacities = found[rest : rest + pods]
        moves = Moves(
            found[:settled],
            found[settled:rest],
            [body[_HEAD.size : at]],
            list(zip(numbers, capacities, strict=True)),
            found[rest + pods :],
        )
        moves._check()
        return moves

    def _check(self) -> None:
        places, lengths = self.reserved[1::3], self.reserved[2::3]
        if len(self.reserved) % 3 or 8 * sum(lengths) != len(self.hashes[0]) or not all(lengths):
            raise Garbled("a chain is cut off")
        if places and (max(places) >= len(self.pods) or max(lengths) >= len(DEPTHS)):
            raise Garbled("a chain on no pod, or longer than any")


def packed_moves(
    tag: int,
    settled: Sequence[int],
    reserved: Sequence[int],
    hashes: Sequence[bytes],
    pods: Sequence[tuple[int, int]],
    last: Sequence[int],
) -> bytes:
    """As `Moves` are, without making any: this is done for every batch."""
    told = b"".join(hashes)
    head = _HEAD.pack(tag, len(settled), len(reserved), len(pods), len(told) >> 3, len(last))
    numbers = words([*settled, *reserved, *[capacity for _, capacity in pods], *last])
    return b"".join((head, told, longs([number for number, _ in pods]), numbers))


JOURNAL_BYTES = 4 * 1024 * 1024
"""Eight bytes are a hash: 130,000 tokens in blocks of 64 take 1.8 KB."""

ANEW = 60.0
"""Seconds after which prompts are told as a whole again, for those who have lost the one that they go on from."""

PER_RECORD = 100

Find = Callable[[int], Endpoint | None]

Told = tuple[int, Key, bytes]
"""What is said when a chain that was reserved has been computed: twice its number, and 1; where the journal will have
it; and its hashes."""

OfPeer = tuple[Reservation, Key, bytes]

_FORGET = Struct("<IQ")
"""Index, the pod's number."""

_MEMORY = Struct("<IQQI")
"""Index, the pod's number, capacity, and how many hashes of a chain follow."""

_TAG = Struct("<I")
_LARGEST = 0xFFFF0000
"""From which on batches begin to count anew."""
_NUMBER, _ENTRY = itemgetter(0), itemgetter(1, 2)


def index_tag(name: str, block_tokens: int) -> int:
    """What processes call an index that they share; an index of another configuration is not meant."""
    return crc32(f"{block_tokens}:{name}".encode())


class SharedIndex(PrefixIndex, Shared):
    """`take_changes` gives what this process did to it, and `touch` is called when there is something; `take` does what
    a peer did.

    Reservations of a peer are numbered by the peer, chain by chain. They pin here what they pin there, until they are
    settled, or the peer is gone.
    """

    kinds = (Kind.MOVES, Kind.FORGET, Kind.MEMORY)

    def __init__(
        self,
        clock: Clock,
        max_bytes: float,
        *,
        tag: int,
        touch: Callable[[], None],
        find: Find,
        flush: Callable[[], None] | None = None,
    ) -> None:
        """`find` gives the living pod of a number. `flush` is called instead of `touch` where what there is to say must
        not wait."""
        super().__init__(clock, max_bytes=max_bytes)
        self._tag = tag
        self._touch = touch
        self._flush = flush or touch
        self._find = find
        self._number = 1
        self._fresh: list[Reservation] = []
        self._computed: list[Reservation] = []
        self._dropped: list[Reservation] = []
        """Nobody was told of these: that they began; that they ended, and how."""
        self._records: list[bytes] = []
        self._own: dict[Reservation, list[Told]] = {}
        self._of_peers: dict[int, dict[int, OfPeer]] = {}
        self._journal = Journal(JOURNAL_BYTES)
        self._now = clock.now
        self._anew_at = clock.now() + ANEW

    # What this process does.

    def reserve(self, chains: Sequence[Chain], endpoint: Endpoint, capacity: int) -> Reservation:
        """On the hot path, as `settle`: all else is done once for a batch."""
        reservation = PrefixIndex.reserve(self, chains, endpoint, capacity)
        fresh = self._fresh
        if not fresh:
            self._touch()
        fresh.append(reservation)
        return reservation

    def settle(self, reservation: Reservation, computed: bool) -> None:
        if reservation.settled:
            return
        PrefixIndex.settle(self, reservation, computed)
        ended = self._computed if computed else self._dropped
        if not ended:
            self._touch()
        ended.append(reservation)

    def lost(self, endpoint: Endpoint) -> None:
        super().lost(endpoint)
        self._gather()
        self._records.append(record(Kind.FORGET, _FORGET.pack(self._tag, pod_number(endpoint.name))))
        self._flush()  # or others confirm meanwhile what is forgotten here

    def forget(self, endpoint: Endpoint) -> None:
        super().forget(endpoint)
        self._journal.forget(pod_number(endpoint.name))

    # What others are told.

    def take_changes(self) -> bytes:
        """Records; empty if there is nothing to say."""
        self._gather()
        found = b"".join(self._records)
        self._records.clear()
        return found

    def begin_anew(self) -> None:
        """Somebody may not know what all others do."""
        self._journal.begin_anew()
        self._anew_at = self._now() + ANEW

    def in_flight(self) -> Records:
        """MOVES: all that is not settled."""
        own = [(reservation, *told) for reservation, all_told in self._own.items() for told in all_told]
        for start in range(0, len(own), PER_RECORD):
            moves, places = Moves(), _Places()
            for reservation, number, _, packed in own[start : start + PER_RECORD]:
                moves.reserved += (number - 1, places[reservation.pod][0], len(packed) >> 3)
                moves.hashes.append(packed)
            moves.pods = places.pods
            yield Kind.MOVES, moves.packed(self._tag)

    def memory(self, share: float) -> Records:
        """MEMORY: what was confirmed last, oldest first."""
        for number, packed in self._journal.latest(int(share * JOURNAL_BYTES)):
            endpoint = self._find(number)
            if endpoint is not None and endpoint in self._pods:
                capacity = max(0, self._pods[endpoint].capacity)
                yield Kind.MEMORY, _MEMORY.pack(self._tag, number, capacity, len(packed) >> 3) + packed

    def _gather(self) -> None:
        """Into a record: all that was settled and reserved."""
        if self._now() >= self._anew_at:
            self.begin_anew()
        fresh, computed, dropped = self._fresh, self._computed, self._dropped
        if not (fresh or computed or dropped):
            return
        self._fresh, self._computed, self._dropped = [], [], []
        settled, *unknown = self._settle_own(computed, dropped)
        reserved, hashes, pods = self._reserve_own(fresh)
        last, *_ = self._settle_own(*unknown)
        if settled or reserved:
            self._records.append(record(Kind.MOVES, packed_moves(self._tag, settled, reserved, hashes, pods, last)))

    def _settle_own(
        self, computed: list[Reservation], dropped: list[Reservation]
    ) -> tuple[list[int], list[Reservation], list[Reservation]]:
        """Of those others were told of, and the rest; what was computed is kept."""
        pop = self._own.pop
        rest: tuple[list[Reservation], list[Reservation]] = [], []
        kept: list[Told] = []
        void: list[Told] = []
        for reservation in computed:
            told = pop(reservation, None)
            if told is None:
                rest[0].append(reservation)
            elif reservation.pod.retired:
                void += told
            else:
                kept += told
        if kept:
            self._journal.add_all(dict(map(_ENTRY, kept)), True)
        said = [*map(_NUMBER, kept), *map(_NUMBER, void)]
        for reservation in dropped:
            told = pop(reservation, None)
            if told is None:
                rest[1].append(reservation)
            else:
                said += [number - 1 for number, _, _ in told]
        return said, *rest

    def _reserve_own(self, fresh: Sequence[Reservation]) -> tuple[list[int], list[bytes], list[tuple[int, int]]]:
        """A chain is told from the last hash on that all others know."""
        own, known_of, number = self._own, self._journal.known.get, self._number % _LARGEST
        places = _Places()
        hashes: list[bytes] = []
        reserved: list[int] = []
        for reservation in fresh:
            rows = own[reservation] = []
            if reservation.pod.retired:  # others would have its successor remember it
                continue
            place, pod = places[reservation.pod]
            for chain, length, at, way in reservation.spans:
                if not length:
                    continue
                number += 2
                known = known_of((pod, chain[at - 1]))
                if known is None or len(known) != 8 * at:
                    known = self._journal.nearest(pod, chain, length, at, way)
                    at = len(known) >> 3
                last = way[-1].segment.hashes  # most often all that is not known
                told = known + (last.tobytes() if len(last) == length - at else longs(chain[at:length]))
                if known:
                    at -= 1
                    hashes.append(told[8 * at :])
                    reserved += (number, place, length - at)
                else:
                    hashes.append(told)
                    reserved += (number - 1, place, length)
                rows.append((number, (pod, chain[length - 1]), told))
        self._number = number
        return reserved, hashes, places.pods

    # What a peer did.

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then. What is not of this index is passed over."""
        try:
            if _TAG.unpack_from(body)[0] == self._tag:
                _TAKE[kind](self, peer, body)
        except StructError:
            raise Garbled(f"{kind.name} that is none") from None

    def vanished(self, peer: int) -> None:
        """Its answers, if there are any, reach nobody."""
        for reservation, _, _ in self._of_peers.pop(peer, {}).values():
            PrefixIndex.settle(self, reservation, False)

    def _take_moves(self, peer: int, body: bytes) -> None:
        moves = Moves.read(body)
        of_peer = self._of_peers.setdefault(peer, {})
        self._settle_of(of_peer, moves.settled)
        self._reserve_of(of_peer, moves)
        self._settle_of(of_peer, moves.settled_last)

    def _reserve_of(self, of_peer: dict[int, OfPeer], moves: Moves) -> None:
        reserve, hashes, end = PrefixIndex.reserve, b"".join(moves.hashes), 0
        pods = [(self._find(number), number, capacity) for number, capacity in moves.pods]
        rows = moves.reserved
        for number, place, length in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
            endpoint, pod, capacity = pods[place]
            packed = hashes[end : end + 8 * length]
            end += 8 * length
            if number & 1:
                packed = self._whole(pod, packed)
            if endpoint is None or not packed:
                continue
            number >>= 1
            if number in of_peer:
                PrefixIndex.settle(self, of_peer.pop(number)[0], False)
            chain = array("Q", packed).tolist()
            of_peer[number] = reserve(self, (chain,), endpoint, capacity), (pod, chain[-1]), packed

    def _whole(self, pod: int, packed: bytes) -> bytes:
        """Empty if what it goes on from is not known here: it will be told anew."""
        known = self._journal.get((pod, int.from_bytes(packed[:8], byteorder))) or b""
        whole = known + packed[8:]
        return whole if known and len(whole) < 8 * len(DEPTHS) else b""

    def _settle_of(self, of_peer: dict[int, OfPeer], settled: list[int]) -> None:
        settle, keep = PrefixIndex.settle, self._journal.add
        for each in settled:
            found = of_peer.pop(each >> 1, None)
            if found is None:
                continue
            reservation, key, packed = found
            settle(self, reservation, bool(each & 1))
            if each & 1 and not reservation.pod.retired:
                keep(key, packed, True)

    def _take_forget(self, peer: int, body: bytes) -> None:
        endpoint = self._find(_FORGET.unpack(body)[1])
        if endpoint is not None:
            self.forget(endpoint)

    def _take_memory(self, peer: int, body: bytes) -> None:
        """Whoever says this tells nobody else."""
        _, number, capacity, hashes = _MEMORY.unpack_from(body)
        packed, endpoint = body[_MEMORY.size :], self._find(number)
        if not 0 < hashes < len(DEPTHS) or len(packed) != 8 * hashes:
            raise Garbled("a chain is cut off, or longer than any")
        if endpoint is not None:
            chain = array("Q", packed).tolist()
            PrefixIndex.settle(self, PrefixIndex.reserve(self, (chain,), endpoint, capacity), True)
            self._journal.add((number, chain[-1]), packed, False)


class _Places(dict[PodMemory, tuple[int, int]]):
    """Of pods in a batch: which of them it is, and its number."""

    def __missing__(self, pod: PodMemory) -> tuple[int, int]:
        place = self[pod] = len(self), pod_number(pod.endpoint.name)
        return place

    @property
    def pods(self) -> list[tuple[int, int]]:
        return [(number, max(0, pod.capacity)) for pod, (_, number) in self.items()]


_TAKE: dict[Kind, Callable[[SharedIndex, int, bytes], None]] = {
    Kind.MOVES: SharedIndex._take_moves,
    Kind.FORGET: SharedIndex._take_forget,
    Kind.MEMORY: SharedIndex._take_memory,
}
