"""The listener that counts requests and attempts, and writes the access log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from proxy.core.attempt import COMPLETE, Attempt, Ending, Usage
from proxy.core.decision import Decision, DecisionRecord, ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.errors import SERVER_ERROR, Declined, Reason
from proxy.core.listener import Listener
from proxy.core.ports import ClientRequest, Clock
from proxy.core.request import InferenceRequest
from proxy.telemetry.access_log import NO_ATTEMPT, AccessLog, Decided, Done, Ended, FirstByte, Served
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import OTHER, Catalogue

log = logging.getLogger(__name__)

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
"""Values of the label `path`: these exact paths, with the same label for their sub-paths; any other path is `other`."""

LONGEST_MODEL = 256
"""Longest model name that becomes a label, in characters: clients can invent names for pods that serve any model."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_OUTCOME_OF_REASON = {
    Reason.UPSTREAM_FAILED.value: Ending.UPSTREAM_FAILED.value,
    Reason.UPSTREAM_TIMED_OUT.value: Ending.TIMED_OUT.value,
}


def is_label(model: str) -> bool:
    """Return whether a name may become a label: it is short, and has no lone surrogates, which are invalid Unicode."""
    return len(model) <= LONGEST_MODEL and not _SURROGATE.search(model)


def path_label(path: str) -> str:
    if known := PATHS.get(path):
        return known
    for prefix, group in PATHS.items():
        if path.startswith(prefix + "/"):
            return group
    return "audio" if path.startswith("/v1/audio/") else OTHER


def outcome_label(outcome: str, refused: bool) -> str:
    """Return the label. `outcome` is the value of an Ending, or of a Reason if the request was `refused`."""
    return _OUTCOME_OF_REASON.get(outcome, "refused") if refused else outcome


OK, LEAST_BAD = 200, 400
"""HTTP statuses: of a success, and the lowest of an error."""


def counted_ending(attempt: Attempt, error: BaseException | None) -> Ending:
    """Return the ending that counts for the pod: UPSTREAM_FAILED also for its 5xx that was relayed whole, COMPLETE also
    for its 4xx that was retried instead, such as the 429 of a full queue."""
    assert attempt.ending is not None
    if isinstance(error, Declined):
        return Ending.UPSTREAM_FAILED if error.is_failure else COMPLETE
    is_whole = attempt.ending is COMPLETE and not attempt.is_by_envoy
    return Ending.UPSTREAM_FAILED if is_whole and (attempt.status or 0) >= SERVER_ERROR else attempt.ending


MOST_TENANTS = 200
"""Largest number of tenants that become labels."""


class RequestSeries:
    """The series of requests. Each method counts records of one kind of event, see `access_log` for their values."""

    def __init__(self, catalogue: Catalogue, endpoints: EndpointSeries, model_limit: int = 1000) -> None:
        self._catalogue = catalogue
        self._endpoints = endpoints
        self._model_limit = model_limit
        self._models: dict[str, _ModelCells] = {}
        self._tenants: set[str] = set()
        self._decision_seconds = catalogue.decision_seconds.cell()
        self._retries = catalogue.retries.cell()
        self._predicted_prompt = catalogue.predicted_prompt.cell()
        self._predicted_hits = catalogue.predicted_hits.cell()
        self._actual_prompt = catalogue.actual_prompt.cell()
        self._actual_hits = catalogue.actual_hits.cell()

    # Loops that fill dictionaries take a third of what sorting and chains of iterators over columns took.

    def decided(self, records: Sequence[Decided]) -> None:
        seconds = []
        for endpoint, taken in records:
            self._endpoints.of(endpoint).decisions += 1
            seconds.append(taken)
        self._decision_seconds.observe_all(seconds)

    def first_bytes(self, records: Sequence[FirstByte]) -> None:
        """Count responses whose first byte arrived."""
        seconds: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
        for status, at, received_at, model, stream in records:
            if status is not None and status < LEAST_BAD:
                seconds[model, stream].append(at - received_at)
        for (model, stream), of_kind in seconds.items():
            cells = self._cells_of(model)
            (cells.ttft_stream if stream else cells.ttft_whole).observe_all(of_kind)

    def attempts_ended(self, records: Sequence[Ended]) -> None:
        endings: defaultdict[tuple[Endpoint, str], int] = defaultdict(int)
        responses: defaultdict[str, list[Served]] = defaultdict(list)
        expected = hits = 0
        for endpoint, ending, number, predicted, prompt, status, model, response in records:
            endings[endpoint, ending._value_] += 1
            if number:
                self._retries.value += 1
            if predicted is not None:
                expected += prompt
                hits += predicted
            if status is not None and status < LEAST_BAD:
                responses[model].append(response)
        for (endpoint, name), number in endings.items():
            self._endpoints.of(endpoint).attempts[name] += number
        self._predicted_prompt.value += expected
        self._predicted_hits.value += hits
        for model, of_model in responses.items():
            self._responded(self._cells_of(model), of_model)

    def stage_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        """Count an attempt whose response was input of the next attempt: prefill or encode."""
        assert attempt.ending is not None
        ending = attempt.ending.value
        self._endpoints.of(attempt.endpoint).attempts[counted_ending(attempt, error).value] += 1
        self._retries.value += attempt.number > 0
        if attempt.last_byte_at is not None:
            cell = self._catalogue.stage_seconds.cell(attempt.stage.value, ending)
            cell.observe(attempt.last_byte_at - attempt.started_at)

    def requests_ended(self, records: Sequence[Done]) -> None:
        seconds: defaultdict[tuple[str | None, str, int, str, type[Ending | Reason]], list[float]] = defaultdict(list)
        for (_, _, path, received_at, identity), ended_at, status, outcome, _, last in records:
            seconds[last[0], path, status, outcome._value_, type(outcome)].append(ended_at - received_at)
            if identity is not None:
                self._of_tenant(identity.tenant, outcome, last[3])
        for kind, of_kind in seconds.items():
            self._ended(*kind, of_kind)

    def _responded(self, cells: _ModelCells, responses: Sequence[Served]) -> None:
        prompts = completions = counted = hits = 0
        paces = []
        for stream, usage, chunks, first, last in responses:
            tokens = chunks
            if usage is not None:
                prompt, tokens, cached = usage
                prompts += prompt
                completions += tokens
                if cached is not None:
                    counted += prompt
                    hits += cached
            if stream and tokens > 1 and first is not None and last is not None:
                paces.append((last - first) / (tokens - 1))  # seconds per token after the first one
        if paces:
            cells.tpot.observe_all(paces)
        cells.prompt.value += prompts
        cells.completion.value += completions
        cells.cached.value += hits
        self._actual_prompt.value += counted
        self._actual_hits.value += hits

    def _ended(
        self, model: str | None, path: str, status: int, outcome: str, kind: type[Ending | Reason], seconds: list[float]
    ) -> None:
        """Count requests that ended with this outcome of this `kind`; `seconds` are their durations."""
        name = model or ""
        cells = self._models.get(name)
        label = name if cells is not None else name and OTHER
        label_of_outcome = outcome_label(outcome, refused=kind is Reason)
        self._catalogue.requests.cell(label, path_label(path), label_of_outcome, f"{status // 100}xx").add(len(seconds))
        if kind is Reason:
            self._catalogue.refused.cell(outcome).add(len(seconds))
        if cells is not None and outcome == Ending.COMPLETE.value and status < LEAST_BAD:
            cells.e2e.observe_all(seconds)

    def _of_tenant(self, tenant: str, outcome: Ending | Reason, usage: Usage | None) -> None:
        """Count a request of a tenant. Labels are limited, because tokens can name any number of tenants."""
        catalogue = self._catalogue
        if tenant not in self._tenants:
            if len(self._tenants) < MOST_TENANTS and is_label(tenant):
                self._tenants.add(tenant)
            else:
                tenant = OTHER
        catalogue.tenant_requests.cell(tenant, outcome_label(outcome.value, refused=isinstance(outcome, Reason))).add()
        if usage is not None:
            catalogue.tenant_prompt.cell(tenant).add(usage.prompt_tokens)
            catalogue.tenant_completion.cell(tenant).add(usage.completion_tokens)
            catalogue.tenant_cached.cell(tenant).add(usage.cached_tokens or 0)

    def _cells_of(self, model: str) -> _ModelCells:
        """Return the cells of a model. Only models that a pod has served become labels: clients can write any name."""
        cells = self._models.get(model)
        if cells is None:
            if len(self._models) >= self._model_limit or not is_label(model):
                return _ModelCells(self._catalogue, OTHER)
            cells = self._models[model] = _ModelCells(self._catalogue, model)
        return cells


class _ModelCells:
    """The cells of one model."""

    __slots__ = ("cached", "completion", "e2e", "prompt", "tpot", "ttft_stream", "ttft_whole")

    def __init__(self, catalogue: Catalogue, label: str) -> None:
        self.ttft_stream = catalogue.ttft.cell(label, "true")
        self.ttft_whole = catalogue.ttft.cell(label, "false")
        self.tpot = catalogue.tpot.cell(label)
        self.e2e = catalogue.e2e.cell(label)
        self.prompt = catalogue.prompt_tokens.cell(label)
        self.completion = catalogue.completion_tokens.cell(label)
        self.cached = catalogue.cached_tokens.cell(label)


INTERVAL = 0.2
"""Seconds between flushes: the largest age of the access log and the metrics' cells."""

BATCH = 256
"""Number of records that are counted and logged without a pause: about a millisecond."""


class Observer(Listener):
    """The listener that records each event of the data path, and counts and logs the records in batches. Run `run()` as
    a task, and `flush()` when it has ended."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        clock: Clock,
        access_log: AccessLog | None = None,
        model_limit: int = 1000,
    ) -> None:
        self._endpoints = endpoints
        self._catalogue = catalogue
        self._now = clock.now
        self.access_log = access_log
        self._series = RequestSeries(catalogue, endpoints, model_limit)
        self._decided: list[Decided] = []
        self._first_bytes: list[FirstByte] = []
        self._attempts: list[Ended] = []
        self._requests: list[Done] = []

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision,
        started: float,
        record: DecisionRecord | None = None,
    ) -> None:
        self._decided.append((decision.target, self._now() - started))

    def first_byte(self, attempt: Attempt) -> None:
        if not attempt.is_continuation:
            request = attempt.request
            self._first_bytes.append(
                (attempt.status, attempt.first_byte_at, request.received_at, request.model, request.stream)
            )

    def attempt_ended(self, attempt: Attempt, error: BaseException | None = None) -> None:
        """Record the attempt. Tokens are counted for attempts that respond to the client."""
        if attempt.for_client:
            request, usage, chunks = attempt.request, attempt.usage, attempt.chunks
            response = (request.stream, usage, chunks, attempt.first_byte_at, attempt.last_byte_at)
            predicted, prompt = attempt.predicted_cached_tokens, request.prompt.tokens
            endpoint, ending, number = attempt.endpoint, attempt.ending, attempt.number
            if attempt.status != OK or ending is not COMPLETE:
                ending = counted_ending(attempt, error)
            self._attempts.append(
                (endpoint, ending, number, predicted, prompt, attempt.status, request.model, response)
            )
        else:
            self._series.stage_ended(attempt, error)

    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        last = NO_ATTEMPT
        if attempt is not None:
            model, usage = attempt.request.model, attempt.usage
            first_byte_at = attempt.stream_started_at or attempt.first_byte_at
            error = ""
            if outcome is not COMPLETE:
                error = client_request.refusal if isinstance(outcome, Reason) else attempt.error
            last = (model, attempt.endpoint.name, first_byte_at, usage, attempt.response_bytes, attempt.number, error)
        elif outcome is not COMPLETE:
            last = (client_request.model, None, None, None, 0, -1, client_request.refusal)
        request = client_request
        summary = (request.id, request.method, request.path, request.received_at, request.identity)
        self._requests.append((summary, self._now(), status, outcome, sent, last))

    def plugin_fault(self, plugin: str, fault: str) -> None:
        self._catalogue.plugin_faults.cell(plugin, fault).value += 1

    def plugin_timed(self, point: str, plugin_type: str, name: str, seconds: float) -> None:
        self._catalogue.plugin_seconds.cell(point, plugin_type, name).observe(seconds)

    def shadow(self, decision: Decision, result: ProfileResult) -> None:
        agrees = "true" if result.best is decision.target else "false"
        self._catalogue.shadow.cell(result.profile, agrees).value += 1

    def regret(self, profile: str, seconds: float) -> None:
        """Count by how many seconds the shadow's pod is predicted to be sooner than the chosen one; or later."""
        sooner = "shadow" if seconds > 0.0 else "live" if seconds < 0.0 else "neither"
        self._catalogue.shadow_regret.cell(profile, sooner).observe(abs(seconds))

    async def run(self) -> None:
        """Count and log events at intervals, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.flush_in_batches()
            except Exception:
                log.exception("some requests are missing in the metrics and the access log")

    async def flush_in_batches(self) -> None:
        """Count and log all events before the call. Let the event loop run between batches."""
        for _ in self._batches():
            await asyncio.sleep(0)

    def flush(self) -> None:
        """Count and log all events before the call, without a pause."""
        for _ in self._batches():
            pass

    def _batches(self) -> Iterator[None]:
        """Process one batch per step. An attempt is counted before its request, because the request gets the label of
        the attempt's model. Two tasks may iterate at a time: no record is processed twice."""
        kinds: tuple[tuple[list[Any], Callable[[list[Any]], None]], ...] = (
            (self._decided, self._series.decided),
            (self._first_bytes, self._series.first_bytes),
            (self._attempts, self._series.attempts_ended),
            (self._requests, self._request_batch),
        )
        for (records, count), number in zip(kinds, [len(records) for records, _ in kinds], strict=True):
            for start in range(0, number, BATCH):
                batch = records[: min(BATCH, number - start)]
                del records[: len(batch)]
                if batch:
                    count(batch)
                    yield

    def _request_batch(self, records: list[Done]) -> None:
        self._series.requests_ended(records)
        if self.access_log is not None:
            self.access_log.write(records)
