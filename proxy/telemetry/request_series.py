"""Series of requests and of their legs, counted a batch of records at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.identity import Identity
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.instruments import OTHER
from proxy.telemetry.labels import is_label, outcome_label, path_label
from proxy.telemetry.records import Record

_COMPLETE = Ending.COMPLETE.value

LEAST_BAD = 400
"""The least status of what is no answer."""

MOST_TENANTS = 200
"""That become labels."""


class RequestSeries:
    """Each method takes the records of one kind of event, at least one; `records` says what is in them."""

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

    def decided(self, records: Sequence[Record]) -> None:
        seconds = []
        for endpoint, taken in records:
            self._endpoints.of(endpoint).decisions += 1
            seconds.append(taken)
        self._decision_seconds.observe_all(seconds)

    def begun(self, records: Sequence[Record]) -> None:
        """Answers of which the first byte came."""
        seconds: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
        for status, at, received_at, model, stream in records:
            if status is not None and status < LEAST_BAD:
                seconds[model, stream].append(at - received_at)
        for (model, stream), of_kind in seconds.items():
            cells = self._answered_for(model)
            (cells.ttft_stream if stream else cells.ttft_whole).observe_all(of_kind)

    def legs_ended(self, records: Sequence[Record]) -> None:
        endings: defaultdict[tuple[Endpoint, str], int] = defaultdict(int)
        answers: defaultdict[str, list[Record]] = defaultdict(list)
        expected = hits = 0
        for endpoint, ending, attempt, predicted, prompt, status, model, answer in records:
            endings[endpoint, ending._value_] += 1
            if attempt:
                self._retries.value += 1
            if predicted is not None:
                expected += prompt
                hits += predicted
            if status is not None and status < LEAST_BAD:
                answers[model].append(answer)
        for (endpoint, said), number in endings.items():
            counts = self._endpoints.of(endpoint).attempts
            counts[said] = counts.get(said, 0) + number
        self._predicted_prompt.value += expected
        self._predicted_hits.value += hits
        for model, of_model in answers.items():
            self._answered(self._answered_for(model), of_model)

    def stage_ended(self, attempt: Attempt) -> None:
        """A leg whose answer was for the next one."""
        assert attempt.ending is not None
        counts, ending = self._endpoints.of(attempt.endpoint).attempts, attempt.ending.value
        counts[ending] = counts.get(ending, 0) + 1
        self._retries.value += attempt.number > 0
        if attempt.last_byte_at is not None:
            cell = self._catalogue.stage_seconds.cell(attempt.stage.value, ending)
            cell.observe(attempt.last_byte_at - attempt.started_at)

    def requests_ended(self, records: Sequence[Record]) -> None:
        seconds: defaultdict[tuple[str | None, str, int, str, type[Ending | Reason]], list[float]] = defaultdict(list)
        for (_, _, path, received_at, identity), ended_at, status, outcome, _, leg in records:
            seconds[leg[0], path, status, outcome._value_, type(outcome)].append(ended_at - received_at)
            if identity is not None:
                self._of_tenant(identity, outcome, leg[3])
        for kind, of_kind in seconds.items():
            self._ended(*kind, of_kind)

    def _answered(self, cells: _ModelCells, answers: Sequence[Record]) -> None:
        prompts = completions = counted = hits = 0
        paces = []
        for stream, usage, chunks, first, last in answers:
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
        """`outcome` is the value of an outcome of this `kind`; `seconds` are those of every request that ended so."""
        name = model or ""
        cells = self._models.get(name)
        label = name if cells is not None else name and OTHER
        said = outcome_label(outcome, refused=kind is Reason)
        self._catalogue.requests.cell(label, path_label(path), said, f"{status // 100}xx").add(len(seconds))
        if kind is Reason:
            self._catalogue.refused.cell(outcome).add(len(seconds))
        if cells is not None and outcome == _COMPLETE and status < LEAST_BAD:
            cells.e2e.observe_all(seconds)

    def _of_tenant(self, identity: Identity, outcome: Ending | Reason, usage: Usage | None) -> None:
        catalogue, tenant = self._catalogue, self._tenant_label(identity.tenant)
        catalogue.tenant_requests.cell(tenant, outcome_label(outcome.value, refused=isinstance(outcome, Reason))).add()
        if usage is not None:
            catalogue.tenant_prompt.cell(tenant).add(usage.prompt_tokens)
            catalogue.tenant_completion.cell(tenant).add(usage.completion_tokens)
            catalogue.tenant_cached.cell(tenant).add(usage.cached_tokens or 0)

    def _tenant_label(self, tenant: str) -> str:
        """Tokens can name any number of tenants."""
        if tenant not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS or not is_label(tenant):
                return OTHER
            self._tenants.add(tenant)
        return tenant

    def _answered_for(self, model: str) -> _ModelCells:
        """Only what a pod has answered becomes a label: clients can write any name."""
        cells = self._models.get(model)
        if cells is None:
            if len(self._models) >= self._model_limit or not is_label(model):
                return _ModelCells(self._catalogue, OTHER)
            cells = self._models[model] = _ModelCells(self._catalogue, model)
        return cells


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
