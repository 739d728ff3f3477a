"""A prefix index that several processes keep synchronised, and its compact encoding."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from struct import Struct
from sys import byteorder
from zlib import crc32

from proxy.cluster.messages import InvalidMessage, RecordKind, longs, read_longs, read_words, record, words
from proxy.cluster.shared import PER_RECORD, Records, Shared, pod_number
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.prefix.forest import Holding, PodMemory, Reservation
from proxy.prefix.hashing import DEPTHS, Chain
from proxy.prefix.index import PrefixIndex

NEAR = 3
"""Number of segments before the end of a prompt in which `Journal.nearest` looks for a chain that the prompt
continues."""

Key = tuple[int, int]
"""The number of a pod, and the last hash of a chain."""


class Journal:
    """The chains that pods computed, in the order of their last confirmation, bounded in bytes. Sent to processes that
    join."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.size = 0
        self._entries: dict[Key, bytes] = {}
        self.get = self._entries.get
        self.known: dict[Key, bytes] = {}
        """The chains that all processes have received since `publish_whole_chains`. Read only."""

    def add(self, chains: dict[Key, bytes], all_know: bool) -> None:
        """Add whole dictionaries at once, because this runs for every batch."""
        entries = self._entries
        self._drop(entries.keys() & chains.keys())
        entries.update(chains)
        self.size += sum(map(len, chains.values()))
        if all_know:
            self.known.update(chains)
        if self.size > self._most:
            self._shrink()

    def nearest(self, pod: int, chain: Chain, length: int, at: int, path: Sequence[Holding]) -> bytes:
        """Return the chain that all processes know and that this one continues, or b"". If the prompt is the next turn
        of a conversation, `known` has the chain at `at`; otherwise it may end at one of the last segments."""
        end = length
        for holding in path[: -NEAR - 1 : -1]:
            end -= len(holding.segment.hashes)
            if 0 < end < at:
                found = self.known.get((pod, chain[end - 1]))
                if found is not None and len(found) == 8 * end:
                    return found
        return b""

    def publish_whole_chains(self) -> None:
        """Assume from now on that no process knows what was published before."""
        self.known.clear()

    def forget(self, pod: int) -> None:
        self._drop([key for key in self._entries if key[0] == pod])

    def latest(self, most_bytes: int) -> list[tuple[int, bytes]]:
        """Return the end of the journal that fits into the limit."""
        found: list[tuple[int, bytes]] = []
        for (pod, _), chain in reversed(self._entries.items()):
            most_bytes -= len(chain)
            if most_bytes < 0:
                break
            found.append((pod, chain))
        return found[::-1]

    def _shrink(self) -> None:
        """Drop a sixteenth more than necessary, because removing the first entry of a dictionary repeatedly is slow.
        Other processes shrink at other moments, so they are not assumed to know the next sixteenth either."""
        part = self._most // 16
        left, oldest = self.size, list[Key]()
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
            self.size -= len(self._entries.pop(key))
            self.known.pop(key, None)


_HEAD = Struct("<IIIIII")
"""Tag of the index, and the lengths of the columns: settled, reserved, pods, hashes, settled last."""


@dataclass(slots=True)
class IndexChanges:
    """The changes of a process to its index during one batch: it settled reservations of earlier batches, reserved
    chains, and settled some of these. `settled` and `settled_last` hold twice the number of a reservation, plus 1 if
    the pod computed it. `reserved` holds three numbers for each chain: twice the number of the reservation, plus 1 if
    it continues a chain that all processes know, whose last hash is then its first one; the position of its pod in
    `pods`; the number of its `hashes`. A pod is its number and its capacity in blocks."""

    settled: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    pods: list[tuple[int, int]] = field(default_factory=list)
    settled_last: list[int] = field(default_factory=list)

    def packed(self, tag: int) -> bytes:
        hashes = b"".join(self.hashes)
        lengths = len(self.settled), len(self.reserved), len(self.pods), len(hashes) >> 3, len(self.settled_last)
        numbers = words([*self.settled, *self.reserved, *[most for _, most in self.pods], *self.settled_last])
        return b"".join((_HEAD.pack(tag, *lengths), hashes, longs([number for number, _ in self.pods]), numbers))

    @staticmethod
    def read(body: bytes) -> IndexChanges:
        """Return the moves in a record. Raise one of UNREADABLE."""
        _, settled, reserved, pods, hashes, last = _HEAD.unpack_from(body)
        at = _HEAD.size + 8 * hashes
        numbers = read_longs(body, at, pods)
        found = read_words(body, at + 8 * pods, settled + reserved + pods + last)
        rest = settled + reserved
        capacities = found[rest : rest + pods]
        moves = IndexChanges(
            found[:settled],
            found[settled:rest],
            [body[_HEAD.size : at]],
            list(zip(numbers, capacities, strict=True)),
            found[rest + pods :],
        )
        moves._check()
        return moves

    def _check(self) -> None:
        positions, lengths = self.reserved[1::3], self.reserved[2::3]
        if len(self.reserved) % 3 or 8 * sum(lengths) != len(self.hashes[0]) or not all(lengths):
            raise InvalidMessage("a chain is cut off")
        if positions and (max(positions) >= len(self.pods) or max(lengths) >= len(DEPTHS)):
            raise InvalidMessage("a chain on no pod, or longer than any")


JOURNAL_BYTES = 4 * 1024 * 1024
"""Size of the journal. A hash takes eight bytes: 130,000 tokens in blocks of 64 take 16 KB."""

WHOLE_CHAINS_EVERY = 60.0
"""Seconds after which whole chains are published again, for processes that dropped what they continue."""

LONGEST_CHAIN = 8 * len(DEPTHS)
"""Bytes of the hashes of a chain, and of the one that it repeats of the chain that it continues."""

MOST_RESERVED = 50_000
"""Largest number of reservations of one peer: it has one for each chain of its requests in flight."""

Find = Callable[[int], Endpoint | None]

Published = tuple[int, Key, bytes]
"""What settling a published reservation needs: twice its number plus 1, its key in the journal, and its hashes."""

OfPeer = tuple[Reservation, Key, bytes]

_FORGET = Struct("<IQ")
"""Tag of the index, the pod's number."""

_MEMORY = Struct("<IQQI")
"""Tag of the index, the pod's number and capacity, and the number of hashes, which follow."""

_TAG = Struct("<I")
_LARGEST = 0xFFFF0000
"""Largest number of a reservation; the next one is numbered from the start."""
_NUMBER, _ENTRY = itemgetter(0), itemgetter(1, 2)


def index_tag(name: str, block_tokens: object) -> int:
    """Return the name of an index in messages: the same in all processes that configure it alike."""
    return crc32(f"{block_tokens}:{name}".encode())


class SharedIndex(PrefixIndex, Shared):
    """A prefix index whose changes are published: `touch` is called when there are changes,
    `collect_changes` returns them.

    A peer numbers its reservations, chain by chain. They pin the same chains here until they are settled or the peer
    has left.
    """

    kinds = (RecordKind.MOVES, RecordKind.FORGET, RecordKind.MEMORY)

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
        """`find` returns the pod of a number. `flush` is called instead of `touch` for changes that must not wait."""
        super().__init__(clock, max_bytes=max_bytes)
        self._tag = tag
        self._touch = touch
        self._flush = flush or touch
        self._find = find
        self._number = 1
        self._fresh: list[Reservation] = []
        self._computed: list[Reservation] = []
        self._dropped: list[Reservation] = []
        """Reservations that started and ended since the last batch."""
        self._records: list[bytes] = []
        self._own: dict[Reservation, list[Published]] = {}
        self._of_peers: dict[int, dict[int, OfPeer]] = {}
        self._journal = Journal(JOURNAL_BYTES)
        self._now = clock.now
        self._whole_at = clock.now() + WHOLE_CHAINS_EVERY

    # What this process does.

    def reserve(self, chains: Sequence[Chain], endpoint: Endpoint, capacity: int) -> Reservation:
        """Reserve chains. Like `settle` it runs for every request; all other work is done once per batch."""
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
        self._records.append(record(RecordKind.FORGET, _FORGET.pack(self._tag, pod_number(endpoint.name))))
        self._flush()  # otherwise others would confirm meanwhile what is forgotten here

    def forget(self, endpoint: Endpoint) -> None:
        super().forget(endpoint)
        self._journal.forget(pod_number(endpoint.name))

    # What is published.

    def collect_changes(self) -> bytes:
        """Return records about what this process did since the last call."""
        self._gather()
        found = b"".join(self._records)
        self._records.clear()
        return found

    def publish_whole_chains(self) -> None:
        """Handle a process that may not know what was published before."""
        self._journal.publish_whole_chains()
        self._whole_at = self._now() + WHOLE_CHAINS_EVERY

    def current(self) -> Records:
        """Yield MOVES of all reservations that are not settled."""
        own = [
            (reservation, *published) for reservation, all_published in self._own.items() for published in all_published
        ]
        for start in range(0, len(own), PER_RECORD):
            moves, positions = IndexChanges(), _Positions()
            for reservation, number, _, packed in own[start : start + PER_RECORD]:
                moves.reserved += (number - 1, positions[reservation.pod][0], len(packed) >> 3)
                moves.hashes.append(packed)
            moves.pods = positions.pods
            yield RecordKind.MOVES, moves.packed(self._tag)

    def lasting(self, part: float) -> Records:
        """Yield MEMORY of the chains that were confirmed last, oldest first."""
        for number, packed in self._journal.latest(int(part * JOURNAL_BYTES)):
            endpoint = self._find(number)
            if endpoint is not None and endpoint in self._pods:
                capacity = max(0, self._pods[endpoint].capacity)
                yield RecordKind.MEMORY, _MEMORY.pack(self._tag, number, capacity, len(packed) >> 3) + packed

    def _gather(self) -> None:
        """Put the settled and reserved chains into a record."""
        if self._now() >= self._whole_at:
            self.publish_whole_chains()
        fresh, computed, dropped = self._fresh, self._computed, self._dropped
        if not (fresh or computed or dropped):
            return
        self._fresh, self._computed, self._dropped = [], [], []
        settled, *unknown = self._settle_own(computed, dropped)
        reserved, hashes, pods = self._reserve_own(fresh)
        last, *_ = self._settle_own(*unknown)
        if settled or reserved:
            self._records.append(
                record(RecordKind.MOVES, IndexChanges(settled, reserved, hashes, pods, last).packed(self._tag))
            )

    def _settle_own(
        self, computed: list[Reservation], dropped: list[Reservation]
    ) -> tuple[list[int], list[Reservation], list[Reservation]]:
        """Return the numbers of published reservations, and unpublished reservations: computed, dropped."""
        pop = self._own.pop
        rest: tuple[list[Reservation], list[Reservation]] = [], []
        kept: list[Published] = []
        void: list[Published] = []
        for reservation in computed:
            published = pop(reservation, None)
            if published is None:
                rest[0].append(reservation)
            elif reservation.pod.retired:
                void += published
            else:
                kept += published
        if kept:
            self._journal.add(dict(map(_ENTRY, kept)), True)
        settled = [*map(_NUMBER, kept), *map(_NUMBER, void)]
        for reservation in dropped:
            published = pop(reservation, None)
            if published is None:
                rest[1].append(reservation)
            else:
                settled += [number - 1 for number, _, _ in published]
        return settled, *rest

    def _reserve_own(self, fresh: Sequence[Reservation]) -> tuple[list[int], list[bytes], list[tuple[int, int]]]:
        """Publish a chain from the last hash that all other processes know."""
        own, known_of, number = self._own, self._journal.known.get, self._number % _LARGEST
        positions = _Positions()
        hashes: list[bytes] = []
        reserved: list[int] = []
        for reservation in fresh:
            memory = reservation.pod
            rows = own[reservation] = []
            if memory.retired:  # others would add it to the successor
                continue
            position, pod = positions[memory]
            for chain, length, at, path in reservation.spans:
                if not length:
                    continue
                number += 2
                known = known_of((pod, chain[at - 1]))
                if known is None or len(known) != 8 * at:
                    known = self._journal.nearest(pod, chain, length, at, path)
                    at = len(known) >> 3
                if at == length:
                    published = known
                else:
                    last = path[-1].segment.hashes  # usually all that is not known
                    published = known + (last.tobytes() if len(last) == length - at else longs(chain[at:length]))
                if known:
                    at -= 1
                    hashes.append(published[8 * at :])
                    reserved += (number, position, length - at)
                else:
                    hashes.append(published)
                    reserved += (number - 1, position, length)
                rows.append((number, (pod, chain[length - 1]), published))
        self._number = number
        return reserved, hashes, positions.pods

    # What peers published.

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        """Records of other indexes are skipped."""
        if _TAG.unpack_from(body)[0] != self._tag:
            return
        if kind is RecordKind.MOVES:
            self._receive_moves(peer, body)
        elif kind is RecordKind.FORGET:
            self._receive_forget(body)
        else:
            self._receive_memory(body)

    def vanished(self, peer: int) -> None:
        """End the requests of a peer that has left."""
        for reservation, _, _ in self._of_peers.pop(peer, {}).values():
            PrefixIndex.settle(self, reservation, False)

    def _receive_moves(self, peer: int, body: bytes) -> None:
        moves = IndexChanges.read(body)
        of_peer = self._of_peers.setdefault(peer, {})
        self._settle_of(of_peer, moves.settled)
        if len(of_peer) + len(moves.reserved) // 3 > MOST_RESERVED:
            raise InvalidMessage(f"a peer has more than {MOST_RESERVED} reservations")
        self._reserve_of(of_peer, moves)
        self._settle_of(of_peer, moves.settled_last)

    def _reserve_of(self, of_peer: dict[int, OfPeer], moves: IndexChanges) -> None:
        claim, known_of, hashes, end = self._claim, self._journal.get, b"".join(moves.hashes), 0
        now, eviction = self._now(), self._eviction
        pods = []
        for number, capacity in moves.pods:
            endpoint = self._find(number)
            pods.append((None if endpoint is None else self._memory_of(endpoint, capacity), number))
        rows = iter(moves.reserved)
        for number, position, length in zip(rows, rows, rows, strict=True):
            memory, pod = pods[position]
            start, end = end, end + 8 * length
            packed = hashes[start:end]
            if number & 1:
                known = known_of((pod, int.from_bytes(packed[:8], byteorder)))
                if known is None or len(known) + len(packed) > LONGEST_CHAIN:
                    continue  # What it continues is unknown here: it will be published again as a whole.
                packed = known + packed[8:]
            if memory is None:
                continue
            number >>= 1
            if number in of_peer:
                PrefixIndex.settle(self, of_peer.pop(number)[0], False)
            chain = array("Q", packed).tolist()
            of_peer[number] = Reservation(memory, [claim(memory, chain)]), (pod, chain[-1]), packed
            if now >= eviction.due_at:
                self._tidy(memory, now)

    def _settle_of(self, of_peer: dict[int, OfPeer], settled: list[int]) -> None:
        settle, pop = PrefixIndex.settle, of_peer.pop
        computed: dict[Key, bytes] = {}
        for each in settled:
            found = pop(each >> 1, None)
            if found is None:
                continue
            reservation, key, packed = found
            if each & 1:
                settle(self, reservation, True)
                if not reservation.pod.retired:
                    computed[key] = packed
            else:
                settle(self, reservation, False)
        if computed:
            self._journal.add(computed, True)

    def _receive_forget(self, body: bytes) -> None:
        endpoint = self._find(_FORGET.unpack(body)[1])
        if endpoint is not None:
            self.forget(endpoint)

    def _receive_memory(self, body: bytes) -> None:
        """Only this process receives it: it has just joined."""
        _, number, capacity, hashes = _MEMORY.unpack_from(body)
        packed, endpoint = body[_MEMORY.size :], self._find(number)
        if not 0 < hashes < len(DEPTHS) or len(packed) != 8 * hashes:
            raise InvalidMessage("a chain is cut off, or longer than any")
        if endpoint is not None:
            chain = array("Q", packed).tolist()
            PrefixIndex.settle(self, PrefixIndex.reserve(self, (chain,), endpoint, capacity), True)
            self._journal.add({(number, chain[-1]): packed}, False)


class _Positions(dict[PodMemory, tuple[int, int]]):
    """The pods of a batch: position and number of each."""

    def __missing__(self, pod: PodMemory) -> tuple[int, int]:
        position = self[pod] = len(self), pod_number(pod.endpoint.name)
        return position

    @property
    def pods(self) -> list[tuple[int, int]]:
        return [(number, max(0, pod.capacity)) for pod, (_, number) in self.items()]
