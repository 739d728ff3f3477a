from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.prefix.forest import HASH_BYTES, HOLDING_BYTES, POD_BYTES, RESPONSE_BYTES, SEGMENT_BYTES, Reservation
from proxy.prefix.hashing import ConversationTurn
from proxy.prefix.index import PrefixIndex
from tests.helpers.examples import examples
from tests.helpers.prefix.naive import Claim, NaiveIndex, Prefix

CONTENTS = st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=8).map(tuple)
NAMES = st.sampled_from(["a", "a", "b", "c"])
CAPACITIES = st.sampled_from([12, 9, 6, 30, 3, 0])
ALL_ALIKE = range(9)
EVER_LARGER = (0, 1, 2, 4, 6, 9, 12, 20, 28)
SIBLINGS = 2
TTL = 30.0


class AnyHistory(RuleBasedStateMachine):
    """With any events in any order, the index matches like its naive model, whatever a hash covers."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.cut(ALL_ALIKE)
        self.endpoints = {name: Endpoint(name) for name in "abc"}
        self.in_flight: list[tuple[Reservation, Claim]] = []
        self.prompts: dict[Reservation, Prefix] = {}
        self.hashes: dict[Prefix, int] = {}
        self.seen: set[Prefix] = set()
        self.found: dict[Prefix, dict[str, int]] = {}
        self.found_at = -1

    @initialize(depths=st.sampled_from([ALL_ALIKE, EVER_LARGER]))
    def cut(self, depths: Sequence[int]) -> None:
        self.index = PrefixIndex(self.clock, SIBLINGS, TTL, depths=depths)
        self.naive = NaiveIndex(SIBLINGS, TTL, depths)

    def hashed(self, chain: Prefix) -> list[int]:
        prefixes = [chain[: depth + 1] for depth in range(len(chain))]
        return [self.hashes.setdefault(prefix, len(self.hashes) + 1) for prefix in prefixes]

    @rule(chain=CONTENTS, name=NAMES, capacity=CAPACITIES)
    def serve(self, chain: Prefix, name: str, capacity: int) -> None:
        self.reserve([chain], name, capacity)
        self.settle(len(self.in_flight) - 1, True)

    @rule(chains=st.lists(CONTENTS, min_size=1, max_size=2), name=NAMES, capacity=CAPACITIES)
    def reserve(self, chains: Sequence[Prefix], name: str, capacity: int) -> None:
        reservation = self.index.reserve([self.hashed(chain) for chain in chains], self.endpoints[name], capacity)
        self.in_flight.append((reservation, self.naive.reserve(chains, name, capacity)))
        self.prompts[reservation] = chains[0]
        self.seen.update(chains)

    @rule(which=st.integers(0, 1000), blocks=st.integers(1, 4))
    def respond(self, which: int, blocks: int) -> None:
        if self.in_flight:
            reservation, claim = self.in_flight[which % len(self.in_flight)]
            self.index.record_response(reservation, blocks * 64, blocks)
            if len(reservation.spans) == 1:
                self.naive.responded(claim, self.prompts[reservation], blocks)

    @rule(before=CONTENTS, further=CONTENTS, names=st.tuples(NAMES, NAMES), capacity=CAPACITIES)
    def converse(self, before: Prefix, further: Prefix, names: tuple[str, str], capacity: int) -> None:
        """A prompt, its response, and the next turn, which is in flight from here on."""
        self.reserve([before], names[0], capacity)
        self.respond(len(self.in_flight) - 1, 2)
        self.settle(len(self.in_flight) - 1, True)
        if (chain := (*before, *further)[:8]) != before:
            self.reserve([chain], names[1], capacity)
            reservation, claim = self.in_flight[-1]
            self.index.note_turn(reservation, self.turn(before))
            self.naive.go_on(claim, before)

    @rule(which=st.integers(0, 1000))
    def start_to_respond(self, which: int) -> None:
        if self.in_flight:
            reservation, claim = self.in_flight[which % len(self.in_flight)]
            self.index.prove(reservation)
            self.naive.prove(claim)

    @rule(name=NAMES)
    def find_nothing(self, name: str) -> None:
        self.index.forget_share(self.endpoints[name], 0.0)
        self.naive.distrust(name)
        self.wait(1)

    @rule(which=st.integers(0, 1000), computed=st.booleans())
    def settle(self, which: int, computed: bool) -> None:
        if not self.in_flight:
            return
        reservation, claim = self.in_flight.pop(which % len(self.in_flight))
        if computed:
            self.index.confirm(reservation)
        else:
            self.index.release(reservation)
        self.naive.settle(claim, computed)

    @rule(name=NAMES, event=st.sampled_from([None, None, None, "restart", "replace"]))
    def disturb(self, name: str, event: str | None) -> None:
        if event is not None:
            self.index.forget(self.endpoints[name])
            self.naive.forget(name)
        if event == "replace":
            self.endpoints[name] = Endpoint(name)

    @rule(seconds=st.integers(1, 9))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)
        self.naive.now += seconds

    @invariant()
    def matches_are_equal(self) -> None:
        before, self.found = self.found, {}
        for chain in self.seen:
            found = self.index.match(self.hashed(chain))
            assert all(found.values())
            self.found[chain] = {endpoint.name: depth for endpoint, depth in found.items()}
            assert self.found[chain] == {name: depth for name in "abc" if (depth := self.naive.match(chain, name))}
        if self.index.version == self.found_at:
            assert all(self.found[chain] == found for chain, found in before.items())
        self.found_at = self.index.version

    @invariant()
    def responses_are_found_by_their_next_turns(self) -> None:
        for before in self.seen:
            chain = (*before, 2)
            turn = self.turn(before)
            found = self.index.match(self.hashed(chain))
            self.index.add_response(found, turn)
            expected = {name: self.naive.match_turn(before, chain, name, turn.blocks) for name in "abc"}
            assert {endpoint.name: depth for endpoint, depth in found.items()} == {
                name: depth for name, depth in expected.items() if depth
            }

    def turn(self, before: Prefix) -> ConversationTurn:
        return ConversationTurn(self.hashed(before)[-1], len(before), self.naive.depths[len(before)] + 1, 1000)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        for name, endpoint in self.endpoints.items():
            expected = self.naive.pods[name].used if name in self.naive.pods else 0
            assert self.index.blocks(endpoint) == expected
        assert self.index.pairs == sum(pod.used for pod in self.naive.pods.values())

    @invariant()
    def bytes_are_counted_right(self) -> None:
        forest = self.index._forest
        segments = set(forest.segments.values())
        holdings = sum(segment.holders.bit_count() for segment in segments)
        hashes = sum(len(segment.hashes) for segment in segments)
        pods = len(forest._by_number)
        responses = sum(
            holding.response is not None
            for pod in forest._by_number
            if pod is not None
            for holding in pod.held.values()
        )
        assert len(segments) == len(forest.segments)
        for segment in segments:
            depth = self.index.depth_of
            assert segment.blocks == depth(segment.start + len(segment.hashes)) - depth(segment.start)
        assert self.index.bytes == (
            len(segments) * SEGMENT_BYTES
            + holdings * HOLDING_BYTES
            + hashes * HASH_BYTES
            + responses * RESPONSE_BYTES
            + pods * POD_BYTES
        )

    def teardown(self) -> None:
        """After the last request nothing is pinned or provisional, and when all pods are gone nothing is left."""
        while self.in_flight:
            self.settle(0, False)
            self.matches_are_equal()
        self.nothing_is_left_behind()
        for name in "abc":
            self.disturb(name, "restart")
        assert self.index.pairs == 0
        assert not self.index._forest.segments
        assert not self.index._forest.responses


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)
