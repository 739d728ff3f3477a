"""Faults of a simulated pod: faults that requests meet by chance, and the states that they cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest


class FaultKind(Enum):
    """The kind of a fault. The first block affects one request; the second block affects the whole pod for
    `seconds`."""

    REJECT = "reject"
    """Refuse the request with `status`, and with `retry_after` if it is set."""
    HANG = "hang"
    """Send no more bytes and keep the connection open until the client disconnects."""
    RESET = "reset"
    FIN = "fin"
    """Close the connection with FIN before the end of the response."""
    DRIP = "drip"
    """Send the complete response a few bytes at a time."""
    GARBAGE = "garbage"
    """Send bytes that are not HTTP."""
    CORRUPT = "corrupt"
    """Cut an event of the stream, or the JSON, in the middle; the HTTP framing is valid."""
    MISFRAME = "misframe"
    """Send invalid chunks in the body."""
    ERROR_FIRST = "error-first"
    """Send 200, then an event that reports a full queue, as vLLM does under a burst; 503 if the response is not
    streamed."""
    LOST_TRANSFER = "lost-transfer"
    """Lose the KV cache that the request leaves for another pod before that pod fetches it; do not find the cache that
    the request is to fetch."""
    SLOW_TRANSFER = "slow-transfer"
    """Take `factor` times as long to fetch the KV cache."""

    REFUSE = "refuse"
    """Close the port; running requests continue."""
    CRASH = "crash"
    """Reset all connections and close the port; the pod restarts with an empty cache."""
    KILLED = "killed"
    """Behave as vLLM after SIGTERM: close the port; running requests hang without an end, even after the pod has
    restarted."""
    FROZEN = "frozen"
    """Stop the engine; its HTTP server continues to work."""
    UNHEALTHY = "unhealthy"
    """Respond to /health with 503; all other paths work."""
    LOADING = "loading"
    """Respond to every request with 503."""
    SHUTTING_DOWN = "shutting-down"
    """Respond with 500 to every request that needs the engine, and with 200 to /health; then restart the process."""
    ENGINE_DEAD = "engine-dead"
    """Behave as vLLM without its EngineCore: running requests end with an error, and every request gets a 500 until the
    process restarts."""
    SLOW_START = "slow-start"
    """Empty the cache, and take `factor` times as long per step; the factor decreases gradually."""


OUTAGES = frozenset(
    {FaultKind.REFUSE, FaultKind.CRASH, FaultKind.KILLED, FaultKind.SHUTTING_DOWN, FaultKind.ENGINE_DEAD}
)
"""Kinds that end when the port is opened again or the process restarts."""

BROKEN = frozenset({FaultKind.HANG, FaultKind.RESET, FaultKind.FIN, FaultKind.GARBAGE, FaultKind.MISFRAME})
"""Faults that end a response early."""

SPOILT = BROKEN | {FaultKind.DRIP, FaultKind.CORRUPT}
STATES = frozenset(list(FaultKind)[list(FaultKind).index(FaultKind.REFUSE) :])


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that a request meets with this `probability`, at most `count` times. Raises ValueError if the values are
    inconsistent."""

    kind: FaultKind
    probability: float = 1.0
    count: int | None = None
    events: int = 0
    """The part of the response before `hang`, `reset`, `fin`, `misframe` and `corrupt`: with 0 not even the head;
    otherwise this many events of a stream, or half of a non-streamed response."""
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
    """The faults of one pod. Lives as long as the pod, also when its engine restarts."""

    def __init__(self) -> None:
        self.set(())

    def set(self, faults: Sequence[Fault], seed: int = 0) -> None:
        """Replace all faults. Raise ValueError if the probabilities add up to more than 1."""
        if sum(fault.probability for fault in faults) > 1.0 + 1e-9:
            raise ValueError("a request meets one fault at most: all probabilities together are 1 at most")
        self.faults = tuple(faults)
        self.seed = seed
        self.met = [0] * len(faults)
        """Number of requests that met each fault."""

    def meet(self, request_id: str) -> Fault | None:
        """Return the fault of a request. The seed and the id alone determine it, so it is the same in every run."""
        draw = xxh3_64_intdigest(request_id.encode(), seed=self.seed) / 2**64
        for index, fault in enumerate(self.faults):
            if draw < fault.probability:
                if fault.count is not None and self.met[index] >= fault.count:
                    return None
                self.met[index] += 1
                return fault
            draw -= fault.probability
        return None


class FaultCondition:
    """The current and past states of one pod, in seconds of its clock. Lives as long as the pod."""

    def __init__(self) -> None:
        self.history: list[tuple[FaultKind, float, float]] = []
        """Each state with its start and its end."""
        self._until: dict[FaultKind, float] = {}

    def start(self, kind: FaultKind, now: float, until: float) -> None:
        self.history.append((kind, now, until))
        self._until[kind] = max(until, self._until.get(kind, 0.0))

    def restarted(self) -> None:
        """End all states, because the process has restarted."""
        self._until.clear()

    def at(self, now: float) -> list[FaultKind]:
        return [kind for kind, until in self._until.items() if now < until]
