"""A pod that serves prompts in turn, at a speed that the tests choose, and the proxy's model of it."""

import random
from collections.abc import Sequence

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest, Prompt
from proxy.latency.pod import PodModel, Prices, seconds
from proxy.latency.rates import FleetModel


class Pod:
    """Prompts are computed one after the other, `fixed` + `per_token` each, with noise; responses have one token."""

    def __init__(
        self,
        fleet: FleetModel | None = None,
        fixed: float = 0.02,
        per_token: float = 100e-6,
        endpoint: Endpoint | None = None,
    ) -> None:
        self.endpoint = endpoint or Endpoint("pod")
        self.fleet = fleet or FleetModel()
        self.model = PodModel(self.endpoint, self.fleet, Prices(0.0, 0.0), 0.0)
        self.fixed = fixed
        self.per_token = per_token
        self.noise = 0.0
        self.now = 0.0
        self._random = random.Random(1)

    def send(self, tokens: int, stream: bool = True) -> Attempt:
        request = InferenceRequest("r", "/v1/completions", "m", Prompt((b"x" * 4 * tokens,)), stream=stream)
        attempt = Attempt(request, Decision(self.endpoint), self.endpoint, 0, self.now)
        self.endpoint.charge(1, tokens)
        return attempt

    def takes(self, tokens: int) -> float:
        chance = self._random.lognormvariate(-(self.noise**2) / 2, self.noise)
        return (self.fixed + tokens * self.per_token) * chance

    def serve(self, sizes: Sequence[int], gap: float = 0.0) -> None:
        """Prompts of these sizes, sent at once; the last is over before this returns."""
        sent = []
        for tokens in sizes:
            attempt = self.send(tokens)
            sent.append((attempt, self.model.dispatch(attempt, tokens, tokens, self.now)))
        for (attempt, work), tokens in zip(sent, sizes, strict=True):
            self.now += self.takes(tokens)
            respond(attempt, self.now)
            self.endpoint.charge(-1, -tokens)
            self.model.end(work, self.now)
        self.now += gap + 0.01
        self.model.catch_up(self.now)

    def work(self, times: int) -> None:
        for _ in range(times):
            self.serve([self._random.randrange(100, 8000) for _ in range(self._random.randrange(1, 4))], gap=0.5)

    def error(self, tokens: int = 4000) -> float:
        """Relative, of the time to first token on the idle pod."""
        takes = self.fixed + tokens * self.per_token
        return abs(self.ttft(tokens, self.now) - takes) / takes

    def ttft(self, tokens: float, now: float) -> float:
        """The prediction for an uncached prompt."""
        self.model.catch_up(now)
        return seconds(self.model, tokens, tokens, now)

    def wait(self, now: float) -> float:
        """What is predicted to pass before the pod turns to the next prompt."""
        return self.ttft(0, now) - self.model.own[0]

    def tpot(self) -> float:
        return self.model.tpot


def respond(attempt: Attempt, now: float, tokens: int = 1) -> None:
    attempt.status, attempt.first_byte_at, attempt.last_byte_at = 200, now, now
    attempt.ending, attempt.chunks = Ending.COMPLETE, tokens
    attempt.usage = Usage(attempt.request.prompt.tokens, tokens)
