"""Series of requests and of their legs, counted a batch of records at a time."""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, groupby, repeat
from operator import attrgetter, is_not, itemgetter, sub
from typing import Any

from proxy.core.errors import Reason
from proxy.core.exchange import Ending, Exchange, Usage
from proxy.core.identity import Identity
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.instruments import OTHER
from proxy.telemetry.labels import is_label, outcome_label, path_label
from proxy.telemetry.records import VALUE, Record

_PROMPT = attrgetter("prompt_tokens")
_COMPLETION = attrgetter("completion_tokens")
_CACHED = attrgetter("cached_tokens")
_COMPLETE = Ending.COMPLETE.value

_GOOD = frozenset(range(400)).__contains__
"""Whether a status, or None, is that of an answer."""

_MODEL = itemgetter(0)
_MODEL_AND_STREAM = itemgetter(0, 1)
_LAST = itemgetter(-1)

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

    def decided(self, records: Sequence[Record]) -> None:
        targets, seconds = zip(*records, strict=True)
        self._decision_seconds.observe_all(seconds)
        for endpoint, number in collections.Counter(targets).items():
            self._endpoints.of(endpoint).decisions += number

    def begun(self, records: Sequence[Record]) -> None:
        """Answers of which the first byte came."""
        statuses, at, received_at, models, streams = zip(*records, strict=True)
        good = compress(zip(models, streams, map(sub, at, received_at), strict=True), map(_GOOD, statuses))
        for (model, stream), answers in groupby(sorted(good, key=_MODEL_AND_STREAM), _MODEL_AND_STREAM):
            cells = self._answered_for(model)
            (cells.ttft_stream if stream else cells.ttft_whole).observe_all(list(map(_LAST, answers)))

    def legs_ended(self, records: Sequence[Record]) -> None:
        endpoints, endings, attempts, predicted, prompts, statuses, models, *answers = zip(*records, strict=True)
        for (endpoint, ending), number in collections.Counter(zip(endpoints, map(VALUE, endings), strict=True)).items():
            counts = self._endpoints.of(endpoint).attempts
            counts[ending] = counts.get(ending, 0) + number
        self._retries.value += sum(map(bool, attempts))
        told = list(map(is_not, predicted, repeat(None)))
        self._predicted_prompt.value += sum(compress(prompts, told))
        self._predicted_hits.value += sum(compress(predicted, told))
        self._answered(statuses, models, zip(*answers, strict=True))

    def stage_ended(self, exchange: Exchange) -> None:
        """A leg whose answer was for the next one."""
        counts, ending = self._endpoints.of(exchange.endpoint).attempts, VALUE(exchange.ending)
        counts[ending] = counts.get(ending, 0) + 1
        self._retries.value += exchange.attempt > 0
        if exchange.last_byte_at is not None:
            cell = self._catalogue.stage_seconds.cell(exchange.stage.value, ending)
            cell.observe(exchange.last_byte_at - exchange.started_at)

    def requests_ended(self, records: Sequence[Record]) -> None:
        calls, ended_at, statuses, outcomes, _, legs = zip(*records, strict=True)
        _, _, paths, received_at, identities = zip(*calls, strict=True)
        if any(identities):
            self._of_tenants(identities, outcomes, legs)
        kinds = zip(map(itemgetter(0), legs), paths, statuses, map(VALUE, outcomes), map(type, outcomes), strict=True)
        seconds: defaultdict[tuple[Any, ...], list[float]] = defaultdict(list)
        for kind, taken in zip(kinds, map(sub, ended_at, received_at), strict=True):
            seconds[kind].append(taken)
        for kind, of_kind in seconds.items():
            self._ended(*kind, of_kind)

    def _answered(self, statuses: Iterable[int | None], models: Sequence[str], answers: Iterable[Record]) -> None:
        good = compress(zip(models, answers, strict=True), map(_GOOD, statuses))
        for model, of_model in groupby(sorted(good, key=_MODEL), _MODEL):
            streams, usages, *rest = zip(*map(_LAST, of_model), strict=True)
            cells = self._answered_for(model)
            if any(streams):
                cells.tpot.observe_all(list(_paces(compress(zip(usages, *rest, strict=True), streams))))
            self._used(cells, list(filter(None, usages)))

    def _used(self, cells: _ModelCells, usages: Sequence[Usage]) -> None:
        cells.prompt.value += sum(map(_PROMPT, usages))
        cells.completion.value += sum(map(_COMPLETION, usages))
        counted = [usage for usage in usages if usage.cached_tokens is not None]
        hits = sum(map(_CACHED, counted))
        cells.cached.value += hits
        self._actual_prompt.value += sum(map(_PROMPT, counted))
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
        if cells is not None and outcome == _COMPLETE and status < 400:
            cells.e2e.observe_all(seconds)

    def _of_tenants(
        self, identities: Sequence[Identity | None], outcomes: Sequence[Ending | Reason], legs: Sequence[Record]
    ) -> None:
        catalogue = self._catalogue
        for identity, outcome, (_, _, _, usage, *_) in zip(identities, outcomes, legs, strict=True):
            if identity is None:
                continue
            tenant = self._tenant_label(identity.tenant)
            said = outcome_label(outcome.value, refused=isinstance(outcome, Reason))
            catalogue.tenant_requests.cell(tenant, said).add()
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


def _paces(answers: Iterable[Record]) -> Iterator[float]:
    """Seconds per token after the first one."""
    for usage, chunks, first, last in answers:
        tokens = usage.completion_tokens if usage is not None else chunks
        if tokens > 1 and first is not None and last is not None:
            yield (last - first) / (tokens - 1)


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
