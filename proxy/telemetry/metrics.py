"""All metrics: instruments, and the declaration of every series."""

from __future__ import annotations

import asyncio
import platform
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

from prometheus_client import Metric
from prometheus_client.samples import Sample

from proxy.core import tasks
from proxy.core.files import out_of_files
from proxy.telemetry.process import FIGURES, figures, has_figures

OTHER = "other"

Dump = Mapping[str, Sequence[tuple[Sequence[str], Any]]]
"""The cells of a process by the name of the family: label values and the dump of each cell."""

C = TypeVar("C", bound="Gauge | Histogram")


class Gauge:
    """A value that goes up and down. `samples` yields the samples of the cell in a family of this name; `dump` is ready
    for JSON, and `merge` adds the dump of another cell."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name, labels, self.value)

    def dump(self) -> float:
        return self.value

    merge = add


class Counter(Gauge):
    """A value that only increases."""

    __slots__ = ()

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name + "_total", labels, self.value)


class Histogram:
    """A histogram. `bounds` are the upper bounds of the buckets, ascending and inclusive; +Inf is implied."""

    __slots__ = ("_edges", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], edges: Sequence[str]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._edges = edges

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Observe each value. Sorting the values and searching the bounds among them takes a third of the time."""
        ordered, counts, before = sorted(values), self.counts, 0
        for bucket, bound in enumerate(self.bounds):
            until = bisect_right(ordered, bound)
            counts[bucket] += until - before
            before = until
        counts[-1] += len(ordered) - before
        self.sum += sum(values)

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        total = 0
        for edge, count in zip(self._edges, self.counts, strict=True):
            total += count
            yield Sample(name + "_bucket", {**labels, "le": edge}, total)
        yield Sample(name + "_count", labels, total)
        yield Sample(name + "_sum", labels, self.sum)

    def dump(self) -> tuple[float, list[int]]:
        return self.sum, self.counts

    def merge(self, dumped: tuple[float, list[int]], /) -> None:
        self.sum += dumped[0]
        self.counts = [own + other for own, other in zip(self.counts, dumped[1], strict=True)]


@dataclass(eq=False)
class Family(Generic[C]):
    """One series name with its cells, one per combination of label values."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    make: Callable[[], C]
    is_of_worker: bool = False
    """Whether it is a gauge that each worker learns by itself, although its name starts as in HOST_GAUGES."""
    cells: dict[tuple[str, ...], C] = field(init=False, default_factory=dict)
    """The cells by their label values."""

    def cell(self, *values: str) -> C:
        """Return the cell of these label values; create it if it is missing. Where the label values are known in
        advance, keep the cell: this costs a lookup per call."""
        cell = self.cells.get(values)
        if cell is None:
            if len(values) != len(self.labels):
                raise ValueError(f"{self.name} has the labels {self.labels}, not {values}")
            cell = self.cells[values] = self.make()
        return cell

    def clear(self) -> None:
        """Drop all cells; for families that are filled again for every exposition."""
        self.cells.clear()

    @property
    def sample_names(self) -> tuple[str, ...]:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(self.kind, ("",))
        return tuple(self.name + suffix for suffix in suffixes)

    @property
    def is_of_host(self) -> bool:
        """Whether this is a gauge that has the same value in every process of a host."""
        return self.kind == "gauge" and self.name.startswith(HOST_GAUGES) and not self.is_of_worker

    def empty(self, *labels: str) -> Family[C]:
        """Return the family without cells and with these further labels."""
        return Family(self.name, self.kind, self.help, (*self.labels, *labels), self.make, self.is_of_worker)

    def slices(self, cells_at_once: int) -> Iterator[Metric]:
        """Yield the family in pieces; at least one, so that help and type are always exposed."""
        cells = list(self.cells.items())
        for start in range(0, len(cells) or 1, cells_at_once):
            metric = Metric(self.name, self.help, self.kind)
            for values, cell in cells[start : start + cells_at_once]:
                metric.samples.extend(cell.samples(self.name, dict(zip(self.labels, values, strict=True))))
            yield metric


def edges_of(bounds: Iterable[float]) -> tuple[str, ...]:
    """Return the values of the label `le`."""
    return (*(repr(float(bound)) for bound in bounds), "+Inf")


PREFIX = "kvlane_"

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 60, 120, 300, 900)
"""Bucket bounds, in seconds, of latencies that users see: dense up to 10 s."""

PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)

HOST_GAUGES = tuple(
    PREFIX + name for name in ("endpoint_", "pool_", "workers", "build_info", "config_", "replicas_", "autoscale_")
)
"""Prefixes of the names of gauges that have the same value in every process of a host, unless `is_of_worker`."""

SUPERVISOR = "supervisor"
"""The value of the label `worker` for the supervisor's own gauges."""

CELLS_AT_ONCE = 2000
"""Number of cells that are merged in one step of the event loop: about a millisecond."""

OVERHEAD = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1, 0.5)
"""Bucket bounds, in seconds, of time spent in kvlane."""

AnyFamily = Family[Any]


def dump_of(families: Iterable[AnyFamily]) -> Dump:
    return {
        family.name: [(values, cell.dump()) for values, cell in family.cells.items()]
        for family in families
        if family.cells
    }


def slices_of(families: Iterable[AnyFamily]) -> Iterator[Metric]:
    """Yield all families in pieces of about 200 samples; pieces of one family follow each other."""
    for family in families:
        yield from family.slices(8 if family.kind == "histogram" else 200)


class Merged:
    """The families of several processes as one: counters and histograms are added up. Gauges get the label `worker`,
    but gauges of the host are the supervisor's."""

    def __init__(self, declared: Catalogue) -> None:
        self._by_name: dict[str, AnyFamily] = {
            family.name: family.empty(*(("worker",) if family.kind == "gauge" and not family.is_of_host else ()))
            for family in declared.all_families
        }

    @property
    def all_families(self) -> Iterable[AnyFamily]:
        return self._by_name.values()

    async def add(self, dump: Dump, worker: str) -> None:
        for _ in self.steps(dump, worker):
            await asyncio.sleep(0)

    def steps(self, dump: Dump, worker: str) -> Iterator[None]:
        """Add the dump of a process, and yield after every CELLS_AT_ONCE cells."""
        number = 0
        for name, cells in dump.items():
            family = self._by_name[name]
            if family.is_of_host and worker != SUPERVISOR:
                continue
            more = (worker,) if family.labels[-1:] == ("worker",) else ()
            for values, dumped in cells:
                family.cell(*values, *more).merge(dumped)
                number += 1
                if number % CELLS_AT_ONCE == 0:
                    yield

    def add_counts(self, dump: Dump) -> Dump:
        """Add a dump at once, and return a dump of the counters and histograms alone."""
        deque(self.steps(dump, ""), maxlen=0)
        return dump_of(family for family in self.all_families if family.kind != "gauge")


class Catalogue:
    """All series of /metrics. To add one, see "Add a metric" in docs/architecture.md."""

    def __init__(self, version: str) -> None:
        self.families: list[AnyFamily] = []
        """The series of kvlane."""
        self._of_process: dict[str, AnyFamily] = {
            name: Family(name, kind, text, (), Counter if kind == "counter" else Gauge)
            for name, kind, text in (FIGURES if has_figures() else ())
        }
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        # requests, as clients see them
        self.requests = counter(
            "requests",
            "Requests, by outcome: the ending of the response; upstream-failed and timed-out also for 502 and 504 of"
            " kvlane; refused for its other errors.",
            ("model", "path", "outcome", "status"),
        )
        self.refused = counter("refused", "Errors that kvlane itself sent, by x-kvlane-reason.", ("reason",))
        self.hung_up = counter(
            "client_connections_refused",
            "Connections to the data port that kvlane closed because of the client or a limit, by reason.",
            ("reason",),
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "Time from receipt of a request to the first byte of its successful response, in seconds.",
            ("model", "stream"),
            LATENCY,
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Time per output token of a stream after the first one, in seconds; per chunk if the pod reports no usage.",
            ("model",),
            PER_TOKEN,
        )
        self.e2e = histogram(
            "request_duration_seconds",
            "Time from receipt of a request to the last byte of its complete response, in seconds.",
            ("model",),
            LATENCY,
        )

        # tenants, if API keys are configured
        self.tenant_requests = counter("tenant_requests", "Requests, by tenant and outcome.", ("tenant", "outcome"))
        self.tenant_prompt = counter("tenant_prompt_tokens", "Prompt tokens, as reported in usage.", ("tenant",))
        self.tenant_completion = counter(
            "tenant_completion_tokens", "Completion tokens, as reported in usage.", ("tenant",)
        )
        self.tenant_cached = counter(
            "tenant_cached_tokens", "Prompt tokens found in KV caches, as reported in usage.", ("tenant",)
        )
        self.limited = counter(
            "limited",
            "Requests that a limit of a key or tenant refused, or would refuse if it were not a shadow limit.",
            ("kind", "name", "shadow"),
        )

        # rewritten models
        self.rewrites = counter("model_rewrites", "Requests whose model was rewritten, by rule.", ("rule", "model"))
        self.fallbacks = counter(
            "model_fallbacks", "Requests sent to a fallback model because a model had no capacity.", ("model", "to")
        )

        # tokens, as the pods count them
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, as reported in usage.", ("model",))
        self.completion_tokens = counter("completion_tokens", "Completion tokens, as reported in usage.", ("model",))
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens found in KV caches, as reported in usage.", ("model",)
        )

        # prefix hit ratios: divide the rate of hits by the rate of prompt tokens
        self.predicted_prompt = counter(
            "prefix_predicted_prompt_tokens", "Estimated prompt tokens of attempts with a predicted hit count."
        )
        self.predicted_hits = counter(
            "prefix_predicted_hit_tokens", "Prompt tokens that the prefix index predicted to be in the pod's KV cache."
        )
        self.actual_prompt = counter(
            "prefix_actual_prompt_tokens", "Prompt tokens of responses that reported cached tokens."
        )
        self.actual_hits = counter("prefix_actual_hit_tokens", "Cached tokens that these responses reported.")
        self.index_error = gauge(
            "endpoint_prefix_prediction_error_ratio",
            "Mean of |predicted - reported| cached tokens over the prompt tokens of the pod's latest responses.",
            ("endpoint",),
            is_of_worker=True,
        )
        self.index_pairs = gauge(
            "prefix_index_blocks", "Blocks in the prefix index; a block counts for every pod that has it."
        )
        self.index_bytes = gauge("prefix_index_bytes", "Estimated memory of the prefix index.")

        # scheduling
        self.decision_seconds = histogram(
            "scheduling_duration_seconds", "Duration of one scheduling decision, in seconds.", (), OVERHEAD
        )
        self.decisions = counter("scheduling_decisions", "Scheduling decisions, by the chosen pod.", ("endpoint",))
        self.plugin_seconds = histogram(
            "plugin_duration_seconds",
            "Duration of one call of a plugin, in seconds; measured for one decision in 64.",
            ("extension_point", "plugin_type", "plugin_name"),
            OVERHEAD,
        )
        self.prediction_error = gauge(
            "latency_prediction_error_ratio",
            "Mean of |predicted - measured| over the mean of recent times to first token; 0 for fewer than 20.",
        )
        self.plugin_faults = counter(
            "scorer_faults",
            "Calls of plugins that raised an error or returned an unusable value.",
            ("plugin", "fault"),
        )
        self.shadow = counter(
            "shadow_decisions",
            "Runs of shadow profiles, by whether they chose the same pod as the decision.",
            ("profile", "agrees"),
        )
        self.shadow_regret = histogram(
            "shadow_regret_seconds",
            "Difference of the predicted times to first token on the chosen pod and on the pod of a shadow profile, in"
            " seconds, by the sooner one (live, shadow or neither).",
            ("profile", "sooner"),
            LATENCY,
        )
        self.attempts = counter(
            "attempts",
            "Attempts, by ending; a 5xx of the pod counts as upstream-failed, a retried 4xx as complete.",
            ("endpoint", "ending"),
        )
        self.retries = counter("retries", "Attempts sent because an earlier attempt failed.")
        self.continuations = counter(
            "continuations", "Attempts to resume a broken stream; they are counted as retries too."
        )

        # prefill on one pod, decode on another
        self.disagg_requests = counter(
            "disagg_requests",
            "Requests of a profile with prefill and decode stages, by result: split, or the reason against.",
            ("result",),
        )
        self.stage_seconds = histogram(
            "disagg_stage_duration_seconds",
            "Duration of attempts that computed a prompt or embeddings for another pod, in seconds, by ending.",
            ("stage", "ending"),
            LATENCY,
        )

        self.hedges = counter(
            "hedges",
            "Hedged requests, by outcome: won or lost by the second attempt, failed on both; no-pod or no-budget if no"
            " second attempt was sent.",
            ("outcome",),
        )

        # flow control
        self.queue_wait = histogram(
            "queue_wait_seconds", "Time spent in the flow-control queue, in seconds.", ("pool", "band"), LATENCY
        )
        self.queue_refused = counter(
            "queue_refused",
            "Requests that flow control refused or evicted, by x-kvlane-reason.",
            ("pool", "band", "reason"),
        )
        self.queue_length = gauge("queue_requests", "Requests in the flow-control queue.", ("pool", "band"))
        self.queue_bytes = gauge("queue_bytes", "Bytes of bodies in the flow-control queue.", ("pool", "band"))
        self.saturation = gauge(
            "saturation_ratio", "Saturation of the pool as flowControl.saturation measures it; 1 is full.", ("pool",)
        )

        # pods, read from the fleet for every exposition
        self.in_flight = gauge(
            "endpoint_in_flight_requests",
            "Requests in flight on the pod, of all proxies that share a store, as this one knows.",
            ("endpoint",),
        )
        self.in_flight_tokens = gauge(
            "endpoint_in_flight_tokens",
            "Uncached prompt tokens in flight on the pod, of all proxies that share a store, as this one knows.",
            ("endpoint",),
        )
        self.state = gauge("endpoint_state", "1 for the current state of the pod.", ("endpoint", "state"))
        self.transitions = counter(
            "endpoint_transitions", "Changes of the pod's state, by the new state.", ("endpoint", "state")
        )
        self.breaker_state = gauge(
            "endpoint_breaker_state", "1 for the current state of the pod's circuit breaker.", ("endpoint", "state")
        )
        self.ejection_reasons = gauge(
            "endpoint_doubts",
            "1 for each reason to eject the pod, also while ejections are ignored.",
            ("endpoint", "reason"),
        )
        self.check_failures = counter(
            "endpoint_check_failures", "Failed health checks of the pod, by kind.", ("endpoint", "check")
        )
        self.waiting = gauge("endpoint_waiting_requests", "Waiting requests of the pod, as scraped.", ("endpoint",))
        self.running = gauge("endpoint_running_requests", "Running requests of the pod, as scraped.", ("endpoint",))
        self.kv_usage = gauge("endpoint_kv_cache_usage_ratio", "Used share of the pod's KV cache.", ("endpoint",))
        self.scrape_age = gauge(
            "endpoint_scrape_age_seconds", "Age of the pod's last successful scrape, in seconds.", ("endpoint",)
        )
        self.scrape_failures = counter("endpoint_scrape_failures", "Failed scrapes of the pod.", ("endpoint",))
        self.pool_waiting = gauge(
            "pool_waiting_requests_mean", "Mean of waiting requests over the ready pods.", ("pool",)
        )
        self.pool_kv_usage = gauge(
            "pool_kv_cache_usage_ratio_mean", "Mean used share of the ready pods' KV caches.", ("pool",)
        )
        self.pool_ready = gauge("pool_ready_endpoints", "Ready pods.", ("pool",))

        # autoscaling
        self.desired_replicas = gauge("autoscale_desired_replicas", "Recommended replicas.", ("pool", "role"))
        self.current_replicas = gauge(
            "autoscale_current_replicas", "Current replicas, including starting ones.", ("pool", "role")
        )
        self.ready_replicas = gauge("autoscale_ready_replicas", "Ready replicas.", ("pool", "role"))
        self.desired_ratio = gauge("autoscale_desired_ratio", "Desired over current replicas.", ("pool", "role"))
        self.total_recommended = gauge(
            "autoscale_total_recommended",
            "Recommended replicas of all roles, before (raw) and after limits.",
            ("pool", "stage"),
        )
        self.pressure = gauge("autoscale_pressure", "Pressure on the role; 1 is full.", ("pool", "role"))
        self.signal = gauge("autoscale_signal", "Metrics and signals of the role.", ("pool", "role", "signal"))
        self.signal_missing = gauge(
            "autoscale_signal_missing", "1 for each signal without a value.", ("pool", "role", "signal")
        )
        self.share = gauge(
            "autoscale_share",
            "Share of the role in the total, by the step of its calculation.",
            ("pool", "role", "kind"),
        )
        self.band_satisfied = gauge(
            "autoscale_band_satisfied", "1 while the ratios of roles are within the preferred band.", ("pool",)
        )
        self.autoscale_reason = gauge(
            "autoscale_reason", "1 for each reason of the latest recommendation.", ("pool", "reason")
        )
        self.autoscale_panic = gauge("autoscale_panic", "1 while the autoscaler is in panic mode.", ("pool",))
        self.autoscale_valid = gauge(
            "autoscale_valid", "1, or 0 while signals are missing and the last recommendation holds.", ("pool",)
        )
        self.decided_at = gauge(
            "autoscale_last_decision_timestamp_seconds",
            "Time of the latest decision, in seconds since the Unix epoch.",
            ("pool",),
        )
        self.draining_replicas = gauge("autoscale_draining_replicas", "Draining pods.", ("pool", "role"))
        self.drain_ready_replicas = gauge(
            "autoscale_drain_ready_replicas", "Pods that have drained and can be removed.", ("pool", "role")
        )
        self.scaling_decisions = counter(
            "autoscale_decisions",
            "Autoscaling decisions, by direction and reason.",
            ("pool", "role", "direction", "reason"),
        )
        self.actuations = counter(
            "autoscale_actuations", "Calls of actuators, by result.", ("pool", "role", "actuator", "result")
        )
        self.prefill_backlog = gauge(
            "autoscale_prefill_backlog_seconds",
            "Predicted prefill work that waits at the pods of the role, in seconds.",
            ("pool", "role"),
        )
        self.role_ttft = histogram(
            "autoscale_time_to_first_token_seconds",
            "Time from sending an attempt to a pod of the role to its first byte, in seconds; to its end for prefill.",
            ("pool", "role"),
            LATENCY,
        )

        # kvlane itself
        self.config_version = gauge(
            "config_version", "Number of the configuration in effect: 1 at start, one more for each reload."
        )
        self.config_info = gauge(
            "config_info", "1, labelled with the configuration in effect and its origin.", ("sha256", "origin")
        )
        self.config_reloads = counter("config_reloads", "Reloads, by result.", ("result",))
        self.config_reloaded_at = gauge(
            "config_last_reload_timestamp_seconds", "Time of the last reload, in seconds since the Unix epoch."
        )
        self.config_reload_is_good = gauge(
            "config_last_reload_successful",
            "1, or 0 if the last reload failed and the configuration before it stays in effect.",
        )
        self.loop_lag = gauge("event_loop_lag_seconds", "Delay of the last timer of the event loop, in seconds.")
        self.access_log_lines_lost = counter(
            "access_log_lines_lost", "Access log lines dropped because standard output was not read."
        )
        self.log_lines_lost = counter(
            "log_lines_lost", "Log lines dropped because standard error was not read, or was closed."
        )
        self.record_lines_lost = counter(
            "record_lines_lost", "Requests missing from the record because it could not be written."
        )
        self.spans_lost = counter(
            "trace_spans_lost", "Spans dropped because the collector refused them or the queue was full."
        )
        self.task_failures = counter(
            "task_failures",
            "Failures of background tasks. Each task was restarted; the traceback is in the log.",
            ("task",),
        )
        self.files_limit = counter(
            "open_files_limit_reached",
            "Connections that failed because the process or its machine had no free file descriptor, by operation:"
            " connect to a pod, accept a client.",
            ("operation",),
        )
        self.workers = gauge("workers", "Serving worker processes.")
        self.worker_restarts = counter("worker_restarts", "Worker processes that crashed and were replaced.")
        self.bus_dropped = counter(
            "bus_dropped_frames",
            "Packets between processes of this host dropped because the reader was slow (`bus` and `frames` are old"
            " words for the links between these processes and their packets).",
        )
        self.bus_garbled = counter(
            "bus_garbled_frames",
            "Unreadable packets between processes of this host (`bus` and `frames`: the links and their packets).",
        )

        # other proxies of the deployment, if replicas.store is set
        self.replicas_known = gauge("replicas_known", "Other hosts of the deployment that publish their state.")
        self.replicas_disagreeing = gauge(
            "replicas_disagreeing", "Other hosts that serve with a different configuration."
        )
        self.replicas_store_up = gauge("replicas_store_up", "1, or 0 while the store is unreachable.")
        self.replicas_staleness = gauge(
            "replicas_staleness_seconds",
            "Round trip of this host's heartbeat over the store, in seconds; while none comes back, the delay of the"
            " next one. Batching adds up to 0.1 s to the age of the state of other hosts.",
        )
        self.replicas_store_losses = counter("replicas_store_losses", "Losses of the connection to the store.")
        self.replicas_missed = counter(
            "replicas_missed", "Gaps in the packets of other hosts that were requested again."
        )
        self.replicas_garbled = counter("replicas_garbled_packets", "Unreadable packets of other hosts.")
        self.replicas_foreign = counter(
            "replicas_foreign_packets",
            "Messages ignored because the other host runs an incompatible release; each has one or more packets.",
        )
        self.replicas_bytes = counter(
            "replicas_bytes",
            "Bytes sent to and received from the store, which also sends back the messages of this host.",
            ("direction",),
        )
        self.replicas_messages = counter(
            "replicas_messages",
            "Messages to and from the store; each has one or more packets. Those received include the messages of this"
            " host.",
            ("direction",),
        )

        self.build = gauge("build_info", "1, labelled with the versions of kvlane and Python.", ("version", "python"))
        self.build.cell(version, platform.python_version()).value = 1

    @property
    def all_families(self) -> Iterable[AnyFamily]:
        """The series of kvlane and of the process."""
        return chain(self.families, self._of_process.values())

    async def read(self) -> None:
        """Update the series that are counted elsewhere. Let the event loop run in between."""
        for task, number in tasks.failures.items():
            self.task_failures.cell(task).value = number
        for operation, number in out_of_files.items():
            self.files_limit.cell(operation).value = number
        for figure in figures() if self._of_process else ():
            if figure is None:
                await asyncio.sleep(0)
            else:
                self._of_process[figure[0]].cell().value = figure[1]

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Return the names of the samples of kvlane's own series."""
        return tuple(name for family in self.families for name in family.sample_names)

    def _counter(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Family[Counter]:
        return self._add(Family(PREFIX + name, "counter", help_text, labels, Counter))

    def _gauge(
        self, name: str, help_text: str, labels: tuple[str, ...] = (), *, is_of_worker: bool = False
    ) -> Family[Gauge]:
        return self._add(Family(PREFIX + name, "gauge", help_text, labels, Gauge, is_of_worker))

    def _histogram(
        self, name: str, help_text: str, labels: tuple[str, ...], bounds: Iterable[float]
    ) -> Family[Histogram]:
        limits = tuple(map(float, bounds))
        edges = edges_of(limits)
        return self._add(Family(PREFIX + name, "histogram", help_text, labels, lambda: Histogram(limits, edges)))

    def _add(self, family: Family[C]) -> Family[C]:
        self.families.append(family)
        return family
