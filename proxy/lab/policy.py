"""What the simulation asks of a router."""

from __future__ import annotations

from typing import Any, Protocol

from proxy.core.attempt import Stage
from proxy.lab.pods import Reading
from proxy.lab.workload import Job


class Policy(Protocol):
    """Told everything a router sees, in the order in which it sees it. `index` numbers requests."""

    scrapes: float
    """Seconds between two scrapes of a pod; 0: it looks at no metrics."""

    def place(self, index: int, job: Job, now: float) -> int | None:
        """The pod that gets the request; None refuses it."""

    def stage(self, index: int) -> Stage:
        """What the pod on which the request was last placed is to do of it. One that computes the prompt keeps it until
        it is fetched, or until another than a pod that fetches it gets the request."""
        return Stage.WHOLE

    def prefilled(self, index: int, now: float, cached_tokens: int) -> int | None:
        """The prompt is computed, of which so many tokens were cached: where the request goes with it."""
        return None

    def first_byte(self, index: int, now: float) -> None: ...

    def ended(self, index: int, now: float, cached_tokens: int) -> None: ...

    def failed(self, index: int, now: float) -> int | None:
        """The pod broke off: where the request goes now, if its answer had not begun; None: nowhere."""

    def predicted(self, index: int) -> int | None:
        """Prompt tokens it expected in the cache of the pod it chose."""

    def scrape_sent(self, pod: int) -> Any:
        """What is to be remembered until the answer comes."""

    def scraped(self, pod: int, reading: Reading | None, sent: Any, sent_at: float) -> None:
        """None: the pod refused the connection."""
