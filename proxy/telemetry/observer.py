"""What the data path says about itself: an event costs an append; counting and logging are done in batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision, ProfileResult
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.listener import Listener
from proxy.core.ports import Call, Clock
from proxy.core.record import DecisionRecord
from proxy.core.request import InferenceRequest
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.records import NO_LEG, Record
from proxy.telemetry.request_series import RequestSeries

log = logging.getLogger(__name__)

INTERVAL = 0.2
"""Seconds between batches: so old may be what the access log and the metrics' cells say."""

BATCH = 256
"""Records that are counted and logged without a pause: about a millisecond."""


class Observer(Listener):
    """Records each event of the data path; counts and logs the records in batches.

    Run `run()` as a task, and `flush()` when it has ended."""

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
        self._now = clock.now
        self.access_log = access_log
        self._series = RequestSeries(catalogue, endpoints, model_limit)
        self._decided: list[Record] = []
        self._begun: list[Record] = []
        self._legs: list[Record] = []
        self._requests: list[Record] = []

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
        if not attempt.continued:
            request = attempt.request
            self._begun.append(
                (attempt.status, attempt.first_byte_at, request.received_at, request.model, request.stream)
            )

    def attempt_ended(self, attempt: Attempt, error: BaseException | None = None) -> None:
        """Tokens are those of the attempts that answer."""
        if attempt.answers:
            request, usage, chunks = attempt.request, attempt.usage, attempt.chunks
            answer = (request.stream, usage, chunks, attempt.first_byte_at, attempt.last_byte_at)
            predicted, prompt = attempt.predicted_cached_tokens, request.prompt.tokens
            endpoint, ending, number = attempt.endpoint, attempt.ending, attempt.number
            self._legs.append((endpoint, ending, number, predicted, prompt, attempt.status, request.model, answer))
        else:
            self._series.stage_ended(attempt)

    def request_ended(
        self, call: Call, status: int, outcome: Ending | Reason, attempt: Attempt | None = None, sent: int = 0
    ) -> None:
        asked = NO_LEG
        if attempt is not None:
            model, begun_at, usage = attempt.request.model, attempt.first_byte_at, attempt.usage
            asked = (model, attempt.endpoint.name, begun_at, usage, attempt.response_bytes, attempt.number)
        called = (call.id, call.method, call.path, call.received_at, call.identity)
        now = self._now
        self._requests.append((called, now(), status, outcome, sent, asked))

    def plugin_fault(self, plugin: str, fault: str) -> None:
        """Count that the plugin of this configured name raised, or returned something that is not usable."""
        self._catalogue.scorer_faults.cell(plugin, fault).value += 1

    def plugin_took(self, point: str, plugin_type: str, name: str, seconds: float) -> None:
        """Count one call of a plugin at this extension point."""
        self._catalogue.plugin_seconds.cell(point, plugin_type, name).observe(seconds)

    def shadow(self, decision: Decision, result: ProfileResult) -> None:
        """A shadow profile was run beside the decision."""
        agrees = "true" if result.best is decision.target else "false"
        self._catalogue.shadow.cell(result.profile, agrees).value += 1

    def regret(self, profile: str, seconds: float) -> None:
        """How much sooner the pod that this shadow profile chose is expected to answer than the one that was chosen;
        negative if later."""
        sooner = "shadow" if seconds > 0.0 else "live" if seconds < 0.0 else "neither"
        self._catalogue.shadow_regret.cell(profile, sooner).observe(abs(seconds))

    def scrape_failed(self, endpoint: Endpoint) -> None:
        """A refresh of a pod's metrics came to nothing."""
        self._endpoints.of(endpoint).scrape_failures += 1

    async def run(self) -> None:
        """Settles at intervals, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL)
            try:
                await self.settle()
            except Exception:
                log.exception("some requests are missing in the metrics and the access log")

    async def settle(self) -> None:
        """Counts and logs all that happened before the call. Lets the event loop run between batches."""
        for _ in self._batches():
            await asyncio.sleep(0)

    def flush(self) -> None:
        """As `settle`, without a pause."""
        for _ in self._batches():
            pass

    def _batches(self) -> Iterator[None]:
        """One step each. A leg is counted before its request, which is labelled with the model that it answered for;
        so later events wait for their turn. Two may go through this at a time: no record is taken twice."""
        kinds = (
            (self._decided, self._series.decided),
            (self._begun, self._series.begun),
            (self._legs, self._series.legs_ended),
            (self._requests, self._request_batch),
        )
        for (records, count), number in zip(kinds, [len(records) for records, _ in kinds], strict=True):
            for start in range(0, number, BATCH):
                batch = records[: min(BATCH, number - start)]
                del records[: len(batch)]
                if batch:
                    count(batch)
                    yield

    def _request_batch(self, records: list[Record]) -> None:
        self._series.requests_ended(records)
        if self.access_log is not None:
            self.access_log.write(records)
