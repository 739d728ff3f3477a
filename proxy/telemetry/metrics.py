"""All metrics: instruments, and the declaration of every series."""

from __future__ import annotations

import platform
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client import Metric
from prometheus_client.samples import Sample

from proxy.core import tasks
from proxy.core.files import out_of_files
from proxy.telemetry.process import ProcSeries

OTHER = "other"


class Cell(Protocol):
    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        """What is exposed for this cell; `name` is that of its family."""


C = TypeVar("C", bound=Cell)


class Counter:
    """Counts up."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name + "_total", labels, self.value)


class Gauge:
    """Set to what was read."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name, labels, self.value)


class Histogram:
    """`bounds` are the upper bounds of the buckets, ascending, each included in its bucket; +Inf is implied."""

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
        """As `observe` of each: to look for the bounds among the values in order takes a third of what it takes to look
        for each value among the bounds."""
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


class Family(Generic[C]):
    """One series name with its cells, one per combination of label values."""

    def __init__(self, name: str, kind: str, help_text: str, labels: Sequence[str], make: Callable[[], C]) -> None:
        self.name = name
        self.kind = kind
        self.help = help_text
        self.labels = tuple(labels)
        self._make = make
        self._cells: dict[tuple[str, ...], C] = {}

    def cell(self, *values: str) -> C:
        """The cell of these label values, made if it is missing. Bind it once; do not call this per request."""
        cell = self._cells.get(values)
        if cell is None:
            if len(values) != len(self.labels):
                raise ValueError(f"{self.name} has the labels {self.labels}, not {values}")
            cell = self._cells[values] = self._make()
        return cell

    @property
    def cells(self) -> Mapping[tuple[str, ...], C]:
        """By their label values."""
        return self._cells

    def clear(self) -> None:
        """Forget all cells: what is read anew for every exposition begins with this."""
        self._cells.clear()

    @property
    def sample_names(self) -> tuple[str, ...]:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(self.kind, ("",))
        return tuple(self.name + suffix for suffix in suffixes)

    def slices(self, cells_at_once: int) -> Iterator[Metric]:
        """The family in pieces, each complete in itself; at least one, so that help and type are always exposed."""
        cells = list(self._cells.items())
        for start in range(0, len(cells) or 1, cells_at_once):
            metric = Metric(self.name, self.help, self.kind)
            for values, cell in cells[start : start + cells_at_once]:
                metric.samples.extend(cell.samples(self.name, dict(zip(self.labels, values, strict=True))))
            yield metric


def edges_of(bounds: Iterable[float]) -> tuple[str, ...]:
    """The values of the label `le`."""
    return (*(repr(float(bound)) for bound in bounds), "+Inf")


F = TypeVar("F", Family[Counter], Family[Gauge], Family[Histogram])

PREFIX = "kvlane_"

LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 60, 120, 300, 900)
"""Seconds a user waits: dense up to 10 s, where people notice."""

PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1)

OVERHEAD = (1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.1, 0.5)
"""Seconds kvlane itself takes."""


class Catalogue:
    """Reads top to bottom as the list of what is exposed. Counters get `_total`, histograms their three suffixes."""

    def __init__(self, version: str) -> None:
        self.families: list[Family[Counter] | Family[Gauge] | Family[Histogram]] = []
        self._process = ProcSeries()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        # requests, as clients see them
        self.requests = counter(
            "requests",
            "Requests answered, by how they ended: an ending of the answer, or refused.",
            ("model", "path", "outcome", "status"),
        )
        self.refused = counter("refused", "Requests that kvlane refused, by x-kvlane-reason.", ("reason",))
        self.hung_up = counter(
            "client_connections_refused",
            "Connections to the data port that kvlane ended as they brought no request to be served, by why.",
            ("reason",),
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From receipt of a request to the first byte of a good answer.",
            ("model", "stream"),
            LATENCY,
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Of a stream, from first to last byte, per token after the first; per chunk where the pod counts none.",
            ("model",),
            PER_TOKEN,
        )
        self.e2e = histogram(
            "request_duration_seconds", "From receipt to the last byte of good, whole answers.", ("model",), LATENCY
        )

        # keys and tenants, where keys are asked for
        self.tenant_requests = counter("tenant_requests", "Requests answered, by tenant.", ("tenant", "outcome"))
        self.tenant_prompt = counter("tenant_prompt_tokens", "Prompt tokens, as reported in usage.", ("tenant",))
        self.tenant_completion = counter("tenant_completion_tokens", "Answered tokens, as reported.", ("tenant",))
        self.tenant_cached = counter("tenant_cached_tokens", "Prompt tokens found in KV caches.", ("tenant",))
        self.limited = counter(
            "limited",
            "Requests that the limits of a key or a tenant refused, or would have refused if they were no shadow.",
            ("kind", "name", "shadow"),
        )

        # models, where `models` says that another one is meant
        self.rewrites = counter(
            "model_rewrites", "Requests that got another model than they named, by the rule.", ("rule", "model")
        )
        self.fallbacks = counter(
            "model_fallbacks", "Requests passed on to another model because one had no room.", ("model", "to")
        )

        # tokens, as the pods count them
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, as reported in usage.", ("model",))
        self.completion_tokens = counter("completion_tokens", "Answered tokens, as reported in usage.", ("model",))
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that pods found in their KV cache.", ("model",))

        # prefix hit ratios: a rate of hits over the rate of prompt tokens beside it
        self.predicted_prompt = counter(
            "prefix_predicted_prompt_tokens", "Estimated prompt tokens of legs for which hits were predicted."
        )
        self.predicted_hits = counter(
            "prefix_predicted_hit_tokens", "Of those, tokens that the prefix index expected in the pod's KV cache."
        )
        self.actual_prompt = counter(
            "prefix_actual_prompt_tokens", "Prompt tokens of answers that reported cached tokens."
        )
        self.actual_hits = counter("prefix_actual_hit_tokens", "Of those, tokens that were in the pod's KV cache.")
        self.index_error = gauge(
            "endpoint_prefix_prediction_error_ratio",
            "Mean of |expected - reported| cached tokens over the prompt tokens of the pod's latest answers, as far as"
            " these report them.",
            ("endpoint",),
        )
        self.index_pairs = gauge(
            "prefix_index_blocks", "Blocks in the prefix index; a block counts for every pod that has it."
        )
        self.index_bytes = gauge("prefix_index_bytes", "Estimated memory of the prefix index.")

        # scheduling
        self.decision_seconds = histogram("scheduling_duration_seconds", "One scheduling decision.", (), OVERHEAD)
        self.decisions = counter("scheduling_decisions", "Decisions, by the pod that was chosen.", ("endpoint",))
        self.plugin_seconds = histogram(
            "plugin_duration_seconds",
            "One call of a plugin; one call in 64 is timed and counted.",
            ("extension_point", "plugin_type", "plugin_name"),
            OVERHEAD,
        )
        self.prediction_error = gauge(
            "latency_prediction_error_ratio",
            "Mean of |predicted - seen| over the mean of recent times to first token; 0 while fewer than 20 are known.",
        )
        self.scorer_faults = counter(
            "scorer_faults",
            "Calls of plugins of any kind that raised an error or returned something unusable.",
            ("plugin", "fault"),
        )
        self.shadow = counter(
            "shadow_decisions", "Runs of shadow profiles, by whether they chose the same pod.", ("profile", "agrees")
        )
        self.shadow_regret = histogram(
            "shadow_regret_seconds",
            "Predicted wait for the first token on the pod that was chosen against that on the pod a shadow chose:"
            " the difference, by who would be answered sooner (live, shadow, or neither).",
            ("profile", "sooner"),
            LATENCY,
        )
        self.attempts = counter("attempts", "Legs sent to pods, by how they ended.", ("endpoint", "ending"))
        self.retries = counter("retries", "Legs that were sent because an earlier one had failed.")
        self.continuations = counter(
            "continuations", "Legs that were to go on with a stream that had broken off; they are retries too."
        )

        # prefill on one pod, decode on another
        self.handed_over = counter(
            "disagg_requests",
            "Requests of a profile with stages, by what came of them: split, or why not.",
            ("result",),
        )
        self.stage_seconds = histogram(
            "disagg_stage_duration_seconds",
            "Legs that computed a prompt, or embeddings, for another pod, by how they ended.",
            ("stage", "ending"),
            LATENCY,
        )

        self.hedges = counter(
            "hedges",
            "Requests whose answer was late, where reliability.hedging is set: won and lost say whether the second"
            " leg answered, failed that none did; no-pod and no-budget that there was none.",
            ("outcome",),
        )

        # requests that wait for room, where flowControl says so
        self.queue_wait = histogram(
            "queue_wait_seconds", "That requests waited before they went on; 0 for most.", ("pool", "band"), LATENCY
        )
        self.queue_refused = counter(
            "queue_refused",
            "Requests that flow control refused, or ended, by x-kvlane-reason.",
            ("pool", "band", "reason"),
        )
        self.queue_length = gauge("queue_requests", "Requests that wait.", ("pool", "band"))
        self.queue_bytes = gauge("queue_bytes", "Bodies of the requests that wait.", ("pool", "band"))
        self.saturation = gauge("saturation_ratio", "What flowControl.saturation measures; 1 is full.", ("pool",))

        # pods, read from the fleet for every exposition
        self.in_flight = gauge("endpoint_in_flight_requests", "Requests that kvlane has on the pod.", ("endpoint",))
        self.in_flight_tokens = gauge(
            "endpoint_in_flight_tokens", "Uncached prompt tokens sent and not answered yet.", ("endpoint",)
        )
        self.state = gauge("endpoint_state", "1 for the state the pod is in.", ("endpoint", "state"))
        self.transitions = counter(
            "endpoint_transitions", "Changes of the pod's state, by the state it came to.", ("endpoint", "state")
        )
        self.breaker_state = gauge(
            "endpoint_breaker_state", "1 for the state of the pod's breaker.", ("endpoint", "state")
        )
        self.doubts = gauge(
            "endpoint_doubts", "1 for everything that speaks against sending requests there.", ("endpoint", "reason")
        )
        self.check_failures = counter(
            "endpoint_check_failures", "Health checks that the pod failed, by their kind.", ("endpoint", "check")
        )
        self.waiting = gauge("endpoint_waiting_requests", "Queue of the pod, as scraped.", ("endpoint",))
        self.running = gauge("endpoint_running_requests", "Running requests of the pod, as scraped.", ("endpoint",))
        self.kv_usage = gauge("endpoint_kv_cache_usage_ratio", "Used share of the pod's KV cache.", ("endpoint",))
        self.scrape_age = gauge("endpoint_scrape_age_seconds", "Age of the pod's last good scrape.", ("endpoint",))
        self.scrape_failures = counter("endpoint_scrape_failures", "Scrapes of the pod that failed.", ("endpoint",))
        self.pool_waiting = gauge("pool_waiting_requests_mean", "Mean queue of the ready pods.", ("pool",))
        self.pool_kv_usage = gauge(
            "pool_kv_cache_usage_ratio_mean", "Mean used share of the ready pods' KV caches.", ("pool",)
        )
        self.pool_ready = gauge("pool_ready_endpoints", "Pods that are ready.", ("pool",))

        # what is recommended where `autoscale` says so, and what became of it
        self.desired_replicas = gauge("autoscale_desired_replicas", "Replicas that there should be.", ("pool", "role"))
        self.current_replicas = gauge("autoscale_current_replicas", "Replicas that were asked for.", ("pool", "role"))
        self.ready_replicas = gauge("autoscale_ready_replicas", "Replicas that serve.", ("pool", "role"))
        self.desired_ratio = gauge("autoscale_desired_ratio", "Desired over current replicas.", ("pool", "role"))
        self.total_recommended = gauge(
            "autoscale_total_recommended", "Replicas of all roles, raw and as limits leave it.", ("pool", "stage")
        )
        self.pressure = gauge("autoscale_pressure", "How hard the role is pressed; 1 is full.", ("pool", "role"))
        self.signal = gauge("autoscale_signal", "Metrics and signals of the role.", ("pool", "role", "signal"))
        self.signal_missing = gauge(
            "autoscale_signal_missing", "1 for those that nothing is known of.", ("pool", "role", "signal")
        )
        self.share = gauge("autoscale_share", "Of the total, by the step of its division.", ("pool", "role", "kind"))
        self.band_satisfied = gauge("autoscale_band_satisfied", "1 while preferred ratios are kept.", ("pool",))
        self.autoscale_reason = gauge("autoscale_reason", "1 for the reasons of the latest result.", ("pool", "reason"))
        self.autoscale_panic = gauge("autoscale_panic", "1 while there is panic.", ("pool",))
        self.autoscale_valid = gauge(
            "autoscale_valid", "1, or 0 while nothing can be seen and the last values are held.", ("pool",)
        )
        self.decided_at = gauge(
            "autoscale_last_decision_timestamp_seconds", "Of the latest decision, since the Unix epoch.", ("pool",)
        )
        self.draining_replicas = gauge("autoscale_draining_replicas", "Pods that drain.", ("pool", "role"))
        self.drain_ready_replicas = gauge(
            "autoscale_drain_ready_replicas", "Pods that have drained, and may be taken away.", ("pool", "role")
        )
        self.scaling_decisions = counter(
            "autoscale_decisions", "Decisions, by where they go and why.", ("pool", "role", "direction", "reason")
        )
        self.actuations = counter(
            "autoscale_actuations", "Of a role, by what came of them.", ("pool", "role", "actuator", "result")
        )
        self.prefill_backlog = gauge(
            "autoscale_prefill_backlog_seconds", "Prefill before the role's pods, as predicted.", ("pool", "role")
        )
        self.leg_ttft = histogram(
            "autoscale_time_to_first_token_seconds",
            "From sending to a pod of the role to its first byte; of prefill to its answer.",
            ("pool", "role"),
            LATENCY,
        )

        # kvlane itself
        self.config_version = gauge(
            "config_version", "Which configuration is in effect: 1 from the start on, one more for every reload."
        )
        self.config_info = gauge(
            "config_info", "1, labelled with the configuration in effect and where it came from.", ("sha256", "origin")
        )
        self.config_reloads = counter("config_reloads", "Reloads, by what came of them.", ("result",))
        self.config_reloaded_at = gauge(
            "config_last_reload_timestamp_seconds", "When the last reload was tried, since the Unix epoch."
        )
        self.config_reload_is_good = gauge(
            "config_last_reload_successful", "1, or 0 if the last one had faults; what was in effect is so still."
        )
        self.loop_lag = gauge("event_loop_lag_seconds", "How late the last timer of the event loop was.")
        self.log_lines_lost = counter("access_log_lines_lost", "Access log lines that nobody read in time.")
        self.stderr_lines_lost = counter(
            "log_lines_lost", "Log lines that were dropped because standard error was not read, or was closed."
        )
        self.record_lines_lost = counter(
            "record_lines_lost", "Requests that are missing in the record, as it could not be written."
        )
        self.spans_lost = counter(
            "trace_spans_lost", "Spans that the collector did not take, or for which no room was left meanwhile."
        )
        self.task_failures = counter(
            "task_failures",
            "Failures of endless background tasks, each of which was restarted; its traceback is in the log.",
            ("task",),
        )
        self.files_limit = counter(
            "open_files_limit_reached",
            "Connections that failed because the process had no file descriptor left, by what was tried: connect to a"
            " pod, accept a client.",
            ("operation",),
        )
        self.workers = gauge("workers", "Workers that serve, where there are several.")
        self.worker_restarts = counter("worker_restarts", "Workers that ended unasked and were replaced.")
        self.bus_dropped = counter("bus_dropped_frames", "Frames between workers that a slow reader made drop.")
        self.bus_garbled = counter("bus_garbled_frames", "Frames between workers that made no sense.")

        # the other proxies of the deployment, where replicas.store is set
        self.replicas_known = gauge("replicas_known", "Other hosts of the deployment that are heard of.")
        self.replicas_disagreeing = gauge(
            "replicas_disagreeing", "Of them, those that serve with another configuration."
        )
        self.replicas_store_up = gauge("replicas_store_up", "1, or 0 while the store is away.")
        self.replicas_staleness = gauge(
            "replicas_staleness_seconds",
            "How old news of others are: what is said takes so long to come back; while nothing does, since when.",
        )
        self.replicas_store_losses = counter("replicas_store_losses", "Times that the store went away.")
        self.replicas_missed = counter("replicas_missed", "Times that packets of others were missed, and asked for.")
        self.replicas_garbled = counter("replicas_garbled_packets", "Packets of others that made no sense.")
        self.replicas_foreign = counter(
            "replicas_foreign_packets",
            "Packets that were passed over: of others whose release says things in another way.",
        )
        self.replicas_bytes = counter("replicas_bytes", "Said to others, and heard.", ("direction",))
        self.replicas_messages = counter("replicas_messages", "Packets said to others, and heard.", ("direction",))

        self.build = gauge("build_info", "1, labelled with what runs.", ("version", "python"))
        self.build.cell(version, platform.python_version()).value = 1

    def slices(self) -> Iterator[Metric]:
        """Everything there is, in pieces of about 200 samples; pieces of one family follow each other."""
        for task, number in tasks.failures.items():
            self.task_failures.cell(task).value = number
        for operation, number in out_of_files.items():
            self.files_limit.cell(operation).value = number
        for family in self.families:
            yield from family.slices(8 if family.kind == "histogram" else 200)
        yield from self._process.slices()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names under which values of kvlane's own series are exposed."""
        return tuple(name for family in self.families for name in family.sample_names)

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Family[Counter]:
        return self._add(Family(PREFIX + name, "counter", help_text, labels, Counter))

    def _gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        return self._add(Family(PREFIX + name, "gauge", help_text, labels, Gauge))

    def _histogram(
        self, name: str, help_text: str, labels: Sequence[str], bounds: Iterable[float]
    ) -> Family[Histogram]:
        limits = tuple(map(float, bounds))
        edges = edges_of(limits)
        return self._add(Family(PREFIX + name, "histogram", help_text, labels, lambda: Histogram(limits, edges)))

    def _add(self, family: F) -> F:
        self.families.append(family)
        return family
