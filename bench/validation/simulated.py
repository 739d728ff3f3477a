"""The same requests for the engine of `proxy.lab.sim`, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from bench.validation.script import Session, TurnResult
from proxy.lab.sim import SamplingParams, SimConfig, SimEngine
from proxy.lab.sim import Sequence as Asked
from proxy.lab.sim.sequence import from_token_ids


class Simulated:
    """`overhead` seconds pass before a request reaches the engine."""

    def __init__(self, config: SimConfig, overhead: float) -> None:
        self._engine = SimEngine(config)
        self._overhead = overhead
        self._due: list[tuple[float, int, int]] = []
        """When a turn reaches the engine: (time, session, turn)."""
        self._prompts: dict[int, bytes] = {}
        self._live: list[tuple[Asked, int, int]] = []

    def play(self, sessions: Sequence[Session]) -> list[TurnResult]:
        """Ordered by session and turn."""
        results: list[TurnResult] = []
        for at, session in enumerate(sessions):
            self._prompts[at] = b""
            self._say(session, at, 0, session.begins)
        now = 0.0
        while self._due or self._engine.busy:
            if not self._engine.busy:
                now = max(now, self._due[0][0])
            self._submit(sessions, now)
            step = self._engine.start_step(now)
            ends = now + step.duration
            self._submit(sessions, math.nextafter(ends, 0.0))
            self._engine.finish_step(step, ends)
            now = ends
            results += self._ended(sessions)
        return sorted(results, key=lambda result: (result.session, result.turn))

    def _say(self, session: Session, at: int, turn: int, after: float) -> None:
        heappush(self._due, (after + session.turns[turn].pause + self._overhead, at, turn))

    def _submit(self, sessions: Sequence[Session], now: float) -> None:
        while self._due and self._due[0][0] <= now:
            arrived, at, number = heappop(self._due)
            turn = sessions[at].turns[number]
            self._prompts[at] += from_token_ids(turn.added)
            turn_request = Asked(self._prompts[at], SamplingParams(turn.output_tokens))
            self._engine.submit(turn_request, arrived)
            self._live.append((turn_request, at, number))

    def _ended(self, sessions: Sequence[Session]) -> list[TurnResult]:
        results = []
        for entry in [entry for entry in self._live if entry[0].progress.ended is not None]:
            self._live.remove(entry)
            turn_request, at, number = entry
            results.append(self._result(turn_request, at, number))
            self._prompts[at] += turn_request.response
            if number + 1 < len(sessions[at].turns):
                self._say(sessions[at], at, number + 1, turn_request.progress.ended or 0.0)
        return results

    def _result(self, turn_request: Asked, at: int, turn: int) -> TurnResult:
        progress = turn_request.progress
        first, ended = progress.first_token or 0.0, progress.ended or 0.0
        per_token = (ended - first) / max(1, progress.generated_tokens - 1)
        waited = first - progress.arrived + self._overhead
        return TurnResult(at, turn, progress.prompt_tokens, progress.cached_tokens, waited, per_token)
