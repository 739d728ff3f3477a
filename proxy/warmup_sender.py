"""Prompts of warm-ups: attempts for the listeners of pods, but not requests in the metrics of clients."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Poster
from proxy.core.request import InferenceRequest
from proxy.gateway import Gateway, Running
from proxy.http.rank import body_for
from proxy.openai.parse import parse
from proxy.openai.prompts import PromptHead
from proxy.prefix.match import PREFIX_MATCH


class WarmupSender:
    """Sends prompts of warm-ups. The ledger has the prompt as load while the pod computes it, and the prefix
    index has it afterwards."""

    def __init__(self, gateway: Callable[[], Gateway], poster: Poster, clock: Clock) -> None:
        """`gateway` returns the gateway in use."""
        self._gateway = gateway
        self._poster = poster
        self._clock = clock

    async def send(self, endpoint: Endpoint, prompt: PromptHead) -> int | None:
        request, gateway = self._request(prompt), self._gateway()
        pool = gateway.pools.having(endpoint)
        await pool.producers.run(request, (endpoint,))
        if _is_held(request, endpoint):
            return None
        attempt = Attempt(request, Decision(endpoint), endpoint, 0, self._clock.now())
        with Running(gateway, pool, attempt):
            url, body = endpoint.url + prompt.path, body_for(endpoint, prompt.body)
            attempt.status, _ = await self._poster.post(url, body, endpoint.api_key, endpoint.rank)
            attempt.first_byte_at = attempt.last_byte_at = self._clock.now()
            attempt.ending = Ending.COMPLETE
        return attempt.status

    def _request(self, prompt: PromptHead) -> InferenceRequest:
        parsed = parse(prompt.path, prompt.body)
        return InferenceRequest(
            id="warm-up",
            path=prompt.path,
            model=prompt.model,
            prompt=parsed.prompt,
            body=prompt.body,
            max_tokens=parsed.max_tokens,
            received_at=self._clock.now(),
        )


def _is_held(request: InferenceRequest, endpoint: Endpoint) -> bool:
    """Return whether the pod has all of the prompt but its last block, whose end no client sent."""
    match = request.state.read(PREFIX_MATCH)
    return match is not None and 0 < match.total - 1 <= match.matched((endpoint,))[0]
