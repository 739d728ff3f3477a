"""Pods that closed their connection while they had a client's request, over all of its attempts."""

from __future__ import annotations

from proxy.core.attempt import Attempt
from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest


class Casualties:
    """Of one client request: retries, hedged attempts, prefill, decode and fallback models share it."""

    __slots__ = ("_noted", "deaths", "had_close_race", "suspected")

    def __init__(self) -> None:
        self.deaths: list[Endpoint] = []
        """Pods that accepted no connection afterwards, in order; a pod that restarted and died again is in it twice."""
        self.suspected: list[Endpoint] = []
        """Pods that closed the connection and may still be alive."""
        self.had_close_race = False
        """Whether the request met a pod that was just closing an idle connection. The second time is no accident."""
        self._noted: set[tuple[Endpoint, float, int]] = set()

    def suspect(self, attempt: Attempt) -> None:
        """Note that its pod closed the connection, or had the request together with one that did."""
        pod = attempt.endpoint.lead
        one = (pod, attempt.started_at, attempt.number)
        if one not in self._noted and pod not in self.suspected:
            self.suspected.append(pod)
        self._noted.add(one)

    def confirm(self, endpoint: Endpoint) -> bool:
        """Note that the pod accepts no connection. Return whether that was unknown."""
        if endpoint not in self.suspected:
            return False
        self.suspected.remove(endpoint)
        self.deaths.append(endpoint)
        return True


CASUALTIES: DataKey[Casualties] = DataKey("Casualties")


def casualties_of(request: InferenceRequest) -> Casualties:
    """Return those of the request; all copies of a request have the same."""
    known = request.state.read(CASUALTIES)
    if known is None:
        known = Casualties()
        request.state.write(CASUALTIES, known)
    return known
