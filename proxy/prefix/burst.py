"""Placement of requests that arrive at the same time: equal prompts together, others evenly."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from proxy.core.endpoint import Endpoint
from proxy.prefix.hashing import Chain

ANY_NUMBER = -1


@dataclass(slots=True, eq=False)
class BurstRequest:
    """A request of a burst: its prompts as chains of blocks, and its candidates. `assigned` and `must_compute` are
    the result; `must_compute`: it is the first with these prompts on that pod."""

    chains: Sequence[Chain]
    endpoints: Sequence[Endpoint]
    blocks: int = field(init=False)
    assigned: Endpoint | None = None
    must_compute: bool = True

    def __post_init__(self) -> None:
        self.blocks = sum(map(len, self.chains))


Unit = list[BurstRequest]
"""Samples with equal prompts; at least one."""


@dataclass(frozen=True, slots=True)
class Rules:
    most_per_pod: int = ANY_NUMBER
    """Largest number of samples of a unit per pod."""
    least_shared: int = 0
    """Number of common blocks from which different prompts are placed together; 0: never."""
    by_tokens: bool = False
    """Whether to balance the blocks to compute instead of the requests."""


def assign(samples: Iterable[BurstRequest], rules: Rules) -> None:
    """Assign all samples. A sample that shares nothing with another one is left unassigned."""
    units = _units(samples)
    chosen = [*_longest_first(unit for unit in units if len(unit) > 1), *_longest_first(_overlapping(units, rules))]
    if not chosen:
        return
    pods = set(chain.from_iterable(unit[0].endpoints for unit in chosen))
    total = sum(unit[0].blocks if rules.by_tokens else len(unit) for unit in chosen)
    placing = _Placing(rules, fair_share=-(-total // max(1, len(pods))))
    for unit in chosen:
        placing.place(unit)


def _units(samples: Iterable[BurstRequest]) -> list[Unit]:
    units: dict[tuple[tuple[int, ...], ...], Unit] = {}
    for sample in samples:
        if sample.blocks and sample.endpoints:
            units.setdefault(tuple(map(tuple, sample.chains)), []).append(sample)
    return list(units.values())


def _overlapping(units: Sequence[Unit], rules: Rules) -> Iterator[Unit]:
    """Yield units of one request whose prompt begins like that of another unit."""
    least = rules.least_shared
    if not least:
        return
    beginnings = [tuple(islice(chain.from_iterable(unit[0].chains), least)) for unit in units]
    count: Counter[tuple[int, ...]] = Counter()
    for beginning, unit in zip(beginnings, units, strict=True):
        count[beginning] += len(unit)
    for beginning, unit in zip(beginnings, units, strict=True):
        if len(unit) == 1 and len(beginning) == least and count[beginning] > 1:
            yield unit


def _longest_first(units: Iterable[Unit]) -> list[Unit]:
    """Sort by length, so that shorter prompts find all common blocks."""
    return sorted(units, key=lambda unit: -unit[0].blocks)


class _Placing:
    """The placement of one burst. `load` is what each pod has got of it, in requests or blocks."""

    def __init__(self, rules: Rules, fair_share: int) -> None:
        self._rules = rules
        self._fair_share = fair_share
        self._load: Counter[Endpoint] = Counter()
        self._held: dict[Endpoint, set[int]] = {}

    def place(self, unit: Unit) -> None:
        rules, first, taken = self._rules, unit[0], Counter[Endpoint]()
        shared = self._shared(first) if rules.least_shared or rules.by_tokens else {}
        target = self._like_minded(first, shared) or self._least_loaded(first, taken)
        left = iter(unit)
        while run := list(islice(left, self._capacity(target, taken))):
            for sample in run:
                sample.assigned, sample.must_compute = target, False
            run[0].must_compute = is_first = target not in taken
            if not rules.by_tokens:
                self._load[target] += len(run)
            elif is_first:
                self._load[target] += max(0, first.blocks - shared.get(target, 0))
            taken[target] += len(run)
            target = self._least_loaded(first, taken)
        for pod in taken:
            self._held.setdefault(pod, set()).update(*first.chains)

    def _capacity(self, target: Endpoint, taken: Mapping[Endpoint, int]) -> int | None:
        """Return how many of a unit a pod takes at once; None: all. Where every pod is full, each gets one in turn."""
        most = self._rules.most_per_pod
        return None if most == ANY_NUMBER else max(1, most - taken.get(target, 0))

    def _shared(self, sample: BurstRequest) -> dict[Endpoint, int]:
        """Return the blocks from the start that pods will have. A pod with one block has all before it."""
        return {
            pod: sum(bisect_left(hashes, True, key=lambda one: one not in held) for hashes in sample.chains)
            for pod, held in self._held.items()
        }

    def _like_minded(self, sample: BurstRequest, shared: Mapping[Endpoint, int]) -> Endpoint | None:
        """Return the pod that will have most of the prompt, if it is enough and the pod has not got its share."""
        least = self._rules.least_shared
        near = [
            pod
            for pod in sample.endpoints
            if least and shared.get(pod, 0) >= least and self._load[pod] < self._fair_share
        ]
        return min(near, key=lambda pod: (-shared[pod], *self._order(pod)), default=None)

    def _least_loaded(self, sample: BurstRequest, taken: Mapping[Endpoint, int]) -> Endpoint:
        most, pods = self._rules.most_per_pod, sample.endpoints
        free = [pod for pod in pods if most == ANY_NUMBER or taken.get(pod, 0) < most]
        return min(free or pods, key=self._order)

    def _order(self, pod: Endpoint) -> tuple[int, int, str]:
        return self._load[pod], pod.view.running, pod.name
