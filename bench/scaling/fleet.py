"""Simulated pods of two roles whose number changes: they take time to start, need GPUs, and finish what they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from proxy.lab.sim import SimConfig
from proxy.lab.sim.config import HARDWARE
from proxy.lab.simulation import VirtualPod

PREFILL, DECODE = ROLES = ("prefill", "decode")
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What all pods are like, and what there is for them; a role has `most` of them at most. A pod holds its GPUs from
    the start of its start-up until the last of its requests has ended. `kv_tokens` are few, so that a fleet of this
    size is full with few requests."""

    hardware: str = "h100-tp4-llama-3.3-70b"
    kv_tokens: int = 60_000
    gpus: int = 4
    budget: int = 48
    most: int = 8
    start_up: float = 120.0

    @property
    def config(self) -> SimConfig:
        config = HARDWARE[self.hardware].equip(SimConfig(block_size=BLOCK))
        return replace(config, num_gpu_blocks=self.kv_tokens // BLOCK)

    @property
    def pods(self) -> int:
        return self.budget // self.gpus

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second of a pod whose steps are full."""
        tokens = self.config.max_num_batched_tokens
        return tokens / self.config.timing.step(tokens, 2)


class State(Enum):
    PENDING = "pending"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True)
class Replica:
    """`pod` is its place in the simulation, once it serves; `busy` are attempts on it, a prefill until its prompt was
    transferred; `tokens` are their tokens, of a prefill the uncached ones."""

    role: str
    state: State
    ready_at: float = 0.0
    pod: int = -1
    busy: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Fleet:
    """All replicas that ever existed. `pods` are the ones that served, in the order of the simulation."""

    shape: Shape
    replicas: list[Replica] = field(default_factory=list)
    pods: list[VirtualPod] = field(default_factory=list)
    moves: int = 0
    wanted: dict[str, int] = field(default_factory=dict)

    def start(self, sizes: Mapping[str, int]) -> None:
        """With so many replicas of each role that serve."""
        for role, count in sizes.items():
            for _ in range(count):
                self._serve(self._add(role))
        self.wanted = dict(sizes)

    def scale(self, role: str, wanted: int) -> None:
        """What does not serve yet goes first, then what has least to do."""
        living = self.of(role, State.PENDING, State.STARTING, State.SERVING)
        self.moves += abs(wanted - len(living))
        self.wanted[role] = wanted
        for _ in range(wanted - len(living)):
            self._add(role)
        living.sort(key=lambda one: (one.state is State.SERVING, one.state is State.STARTING, one.busy))
        for one in living[: max(len(living) - wanted, 0)]:
            one.state = State.DRAINING if one.state is State.SERVING else State.GONE

    def of(self, role: str, *states: State) -> list[Replica]:
        return [one for one in self.replicas if one.role == role and one.state in states]

    def pass_time(self, now: float) -> None:
        """Drained replicas end; replicas that wait for GPUs start on free ones in their order."""
        for one in self.replicas:
            if one.state is State.DRAINING and not one.busy:
                one.state = State.GONE
            elif one.state is State.STARTING and one.ready_at <= now:
                self._serve(one)
        for one in self.replicas:
            if one.state is State.PENDING and self.gpus + self.shape.gpus <= self.shape.budget:
                one.state, one.ready_at = State.STARTING, now + self.shape.start_up

    @property
    def gpus(self) -> int:
        """That are held."""
        return self.shape.gpus * sum(one.state not in (State.PENDING, State.GONE) for one in self.replicas)

    def _add(self, role: str) -> Replica:
        self.replicas.append(Replica(role, State.PENDING))
        return self.replicas[-1]

    def _serve(self, one: Replica) -> None:
        one.state, one.pod = State.SERVING, len(self.pods)
        self.pods.append(VirtualPod(one.pod, self.shape.config))
