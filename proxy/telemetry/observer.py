"""What the data path says about itself; every method is plain, never waits and costs about a microsecond."""

from __future__ import annotations

import re

from proxy.core.decision import Decision, ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.exchange import Ending, Exchange
from proxy.core.ports import Call, Clock
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.instruments import OTHER, Counter

PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/v1/score": "score",
    "/score": "score",
    "/classify": "classify",
    "/pooling": "pooling",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/models": "models",
    "/v1/realtime": "realtime",
    "/health": "health",
}
"""The label `path`: exact paths here, their sub-paths under the same label, any other path is `other`."""

LONGEST_MODEL = 256
"""Characters of a model's name that can be a label; pods that serve any model answer for what clients make up."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_ENDINGS = {Reason.UPSTREAM_FAILED: Ending.UPSTREAM_FAILED.value, Reason.UPSTREAM_TIMED_OUT: Ending.TIMED_OUT.value}


class Observer:
    """Called by the gateway and the rim, once per event; each method says which."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        clock: Clock,
        access_log: AccessLog | None = None,
        model_limit: int = 1000,
    ) -> None:
        self._catalogue = catalogue
        self._endpoints = endpoints
        self._clock = clock
        self._access_log = access_log
        self._model_limit = model_limit
        self._models: dict[str, _ModelCells] = {}
        self._requests: dict[tuple[str, str, str, int], Counter] = {}
        self._decision_seconds = catalogue.decision_seconds.cell()
        self._retries = catalogue.retries.cell()
        self._predicted_prompt = catalogue.predicted_prompt.cell()
        self._predicted_hits = catalogue.predicted_hits.cell()
        self._actual_prompt = catalogue.actual_prompt.cell()
        self._actual_hits = catalogue.actual_hits.cell()

    def decided(self, decision: Decision, seconds: float) -> None:
        """The scheduler returned."""
        self._decision_seconds.observe(seconds)
        self._endpoints.of(decision.target).decisions += 1

    def first_byte(self, exchange: Exchange) -> None:
        """The first byte of a pod's answer came; `status` and `first_byte_at` are set."""
        status, at = exchange.status, exchange.first_byte_at
        if status is not None and status < 400 and at is not None:
            request = exchange.request
            cells = self._models.get(request.model) or self._admit(request.model)
            (cells.ttft_stream if request.stream else cells.ttft_whole).observe(at - request.received_at)

    def leg_ended(self, exchange: Exchange) -> None:
        """A leg is over; all that `Exchange` will ever say is set."""
        ending = exchange.ending
        if ending is not None:
            attempts = self._endpoints.of(exchange.endpoint).attempts
            attempts[ending.value] = attempts.get(ending.value, 0) + 1
        if exchange.attempt:
            self._retries.value += 1
        if exchange.predicted_cached_tokens is not None:
            self._predicted_prompt.value += exchange.request.prompt.tokens
            self._predicted_hits.value += exchange.predicted_cached_tokens
        if exchange.status is not None and exchange.status < 400:
            self._answered(exchange)

    def request_ended(
        self, call: Call, status: int, outcome: Ending | Reason, exchange: Exchange | None = None, sent: int = 0
    ) -> None:
        """The client has its answer, or is gone. `status` is what it was sent (499: nothing, it left), `exchange` the
        last leg if there was one, `sent` the bytes of the answer's body."""
        now = self._clock.now()
        request = exchange.request if exchange is not None else None
        model = request.model if request is not None else ""
        cells = self._models.get(model)
        label = model if cells is not None else model and OTHER
        path = PATHS.get(call.path) or _group(call.path)
        key = (label, path, outcome.value, status // 100)
        cell = self._requests.get(key) or self._bind(key, outcome)
        cell.value += 1
        seconds = now - call.received_at
        if cells is not None and outcome is Ending.COMPLETE and status < 400:
            cells.e2e.observe(seconds)
        if self._access_log is not None:
            self._access_log.add(call, status, outcome.value, exchange, seconds, sent)

    def refused(self, reason: Reason) -> None:
        """A RequestError was rendered; also say `request_ended`."""
        self._catalogue.refused.cell(reason.value).value += 1

    def scorer_fault(self, plugin: str, fault: str) -> None:
        """A scorer of this configured name raised, or gave a score that is none."""
        self._catalogue.scorer_faults.cell(plugin, fault).value += 1

    def shadow(self, decision: Decision, result: ProfileResult) -> None:
        """A shadow profile was run beside the decision."""
        agrees = "true" if result.best is decision.target else "false"
        self._catalogue.shadow.cell(result.profile, agrees).value += 1

    def scrape_failed(self, endpoint: Endpoint) -> None:
        """A refresh of a pod's metrics came to nothing."""
        self._endpoints.of(endpoint).scrape_failures += 1

    def _answered(self, exchange: Exchange) -> None:
        cells = self._models.get(exchange.request.model) or self._admit(exchange.request.model)
        usage = exchange.usage
        if exchange.request.stream:
            tokens = usage.completion_tokens if usage is not None else exchange.chunks
            first, last = exchange.first_byte_at, exchange.last_byte_at
            if tokens > 1 and first is not None and last is not None:
                cells.tpot.observe((last - first) / (tokens - 1))
        if usage is None:
            return
        cells.prompt.value += usage.prompt_tokens
        cells.completion.value += usage.completion_tokens
        if usage.cached_tokens is not None:
            cells.cached.value += usage.cached_tokens
            self._actual_prompt.value += usage.prompt_tokens
            self._actual_hits.value += usage.cached_tokens

    def _admit(self, model: str) -> _ModelCells:
        """Only what a pod has answered becomes a label: clients can write any name."""
        if len(self._models) >= self._model_limit or not _is_label(model):
            return _ModelCells(self._catalogue, OTHER)
        cells = self._models[model] = _ModelCells(self._catalogue, model)
        return cells

    def _bind(self, key: tuple[str, str, str, int], outcome: Ending | Reason) -> Counter:
        label, path, _, hundreds = key
        said = _ENDINGS.get(outcome, "refused") if isinstance(outcome, Reason) else outcome.value
        cell = self._requests[key] = self._catalogue.requests.cell(label, path, said, f"{hundreds}xx")
        return cell


class _ModelCells:
    """The cells of one model, bound once."""

    __slots__ = ("cached", "completion", "e2e", "prompt", "tpot", "ttft_stream", "ttft_whole")

    def __init__(self, catalogue: Catalogue, label: str) -> None:
        self.ttft_stream = catalogue.ttft.cell(label, "true")
        self.ttft_whole = catalogue.ttft.cell(label, "false")
        self.tpot = catalogue.tpot.cell(label)
        self.e2e = catalogue.e2e.cell(label)
        self.prompt = catalogue.prompt_tokens.cell(label)
        self.completion = catalogue.completion_tokens.cell(label)
        self.cached = catalogue.cached_tokens.cell(label)


def _is_label(model: str) -> bool:
    """Not if it is too long, nor if it holds lone surrogates, which no exposition can write."""
    return len(model) <= LONGEST_MODEL and not _SURROGATE.search(model)


def _group(path: str) -> str:
    for prefix, group in PATHS.items():
        if path.startswith(prefix + "/"):
            return group
    return "audio" if path.startswith("/v1/audio/") else OTHER
