"""What goes wrong on a simulated pod: faults that requests meet by chance, and the states that they leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest


class Kind(Enum):
    """The first block spoils one request; the second block affects the whole pod for `seconds`."""

    REJECT = "reject"
    """Refused with `status`, and with `retry_after` if there is one."""
    HANG = "hang"
    """No more bytes, but no end either, until the client leaves."""
    RESET = "reset"
    FIN = "fin"
    """Closed in good order, but before the end of the response."""
    DRIP = "drip"
    """A few bytes at a time, and all of them."""
    GARBAGE = "garbage"
    """Bytes that are not HTTP."""
    CORRUPT = "corrupt"
    """An event of the stream, or the JSON, is cut in the middle; HTTP is in order."""
    MISFRAME = "misframe"
    """The chunks of the body make no sense."""
    ERROR_FIRST = "error-first"
    """200, then an event that says that the queue is full, as vLLM does under a burst; 503 if it is no stream."""
    LOST_TRANSFER = "lost-transfer"
    """What the request leaves for another pod is gone before that one comes, what it is to fetch is not found."""
    SLOW_TRANSFER = "slow-transfer"
    """It takes `factor` times as long to fetch."""

    REFUSE = "refuse"
    """The port is closed; what runs goes on."""
    CRASH = "crash"
    """All connections are reset, the port is closed; it comes back with an empty cache."""
    KILLED = "killed"
    """As vLLM after SIGTERM: the port is closed, what runs hangs without an end, also after the pod has come back."""
    FROZEN = "frozen"
    """The engine stands still behind a server that is well."""
    UNHEALTHY = "unhealthy"
    """/health is 503, everything else is well."""
    LOADING = "loading"
    """503 for everything."""
    SHUTTING_DOWN = "shutting-down"
    """500 for everything that needs the engine, while /health is 200; then the process starts again."""
    ENGINE_DEAD = "engine-dead"
    """As vLLM without its EngineCore: what runs ends with an error, 500 for everything, until the process starts
    again."""
    SLOW_START = "slow-start"
    """The cache is empty, and steps take `factor` times as long, less by and by."""


OUTAGES = frozenset({Kind.REFUSE, Kind.CRASH, Kind.KILLED, Kind.SHUTTING_DOWN, Kind.ENGINE_DEAD})
"""What ends with a port that is opened again, or with a process that starts again."""

BROKEN = frozenset({Kind.HANG, Kind.RESET, Kind.FIN, Kind.GARBAGE, Kind.MISFRAME})
"""Faults that end a response early."""

SPOILT = BROKEN | {Kind.DRIP, Kind.CORRUPT}
STATES = frozenset(list(Kind)[list(Kind).index(Kind.REFUSE) :])


@dataclass(frozen=True, slots=True)
class Fault:
    """`probability` of a request, at most `count` times. Raises ValueError if it makes no sense."""

    kind: Kind
    probability: float = 1.0
    count: int | None = None
    events: int = 0
    """How much of the response passes before `hang`, `reset`, `fin`, `misframe` and `corrupt`: 0 not even its head,
    else so many events of a stream, or half of a whole response."""
    seconds: float = 1.0
    status: int = 503
    retry_after: int | None = None
    factor: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.probability <= 1.0:
            raise ValueError("a probability is between 0 and 1")
        if min(self.events, self.seconds, self.count or 0) < 0 or self.factor < 1.0:
            raise ValueError("count, events and seconds are not negative, factor is at least 1")
        if not 400 <= self.status <= 599:
            raise ValueError("the status of a refusal is between 400 and 599")


class Faults:
    """The faults of one pod. Lives as long as the pod does, whatever happens to its engine."""

    def __init__(self) -> None:
        self.set(())

    def set(self, faults: Sequence[Fault], seed: int = 0) -> None:
        """In place of those before. Raises ValueError if more than every request would meet one."""
        if sum(fault.probability for fault in faults) > 1.0 + 1e-9:
            raise ValueError("a request meets one fault at most: all probabilities together are 1 at most")
        self.faults = tuple(faults)
        self.seed = seed
        self.met = [0] * len(faults)
        """How many requests did, by fault."""

    def meet(self, request_id: str) -> Fault | None:
        """Decided by the seed and the id alone: it is the same in every run, whatever else happens at the time."""
        draw = xxh3_64_intdigest(request_id.encode(), seed=self.seed) / 2**64
        for index, fault in enumerate(self.faults):
            if draw < fault.probability:
                if fault.count is not None and self.met[index] >= fault.count:
                    return None
                self.met[index] += 1
                return fault
            draw -= fault.probability
        return None


class Condition:
    """The states that one pod is in, and was in, in seconds of its clock. Lives as long as the pod does."""

    def __init__(self) -> None:
        self.history: list[tuple[Kind, float, float]] = []
        """Each with when it began, and when it ends."""
        self._until: dict[Kind, float] = {}

    def start(self, kind: Kind, now: float, until: float) -> None:
        self.history.append((kind, now, until))
        self._until[kind] = max(until, self._until.get(kind, 0.0))

    def restarted(self) -> None:
        """What was wrong with the process has ended with it."""
        self._until.clear()

    def at(self, now: float) -> list[Kind]:
        return [kind for kind, until in self._until.items() if now < until]
