"""Every Prometheus series of kvlane, in one place; an instance per process, handed to those who count."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import Metric

from proxy.telemetry.instruments import Counter, Family, Gauge, Histogram, edges_of
from proxy.telemetry.proc import ProcSeries

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
        self.index_pairs = gauge(
            "prefix_index_blocks", "Blocks in the prefix index; a block counts for every pod that has it."
        )
        self.index_bytes = gauge("prefix_index_bytes", "Estimated memory of the prefix index.")

        # scheduling
        self.decision_seconds = histogram("scheduling_duration_seconds", "One scheduling decision.", (), OVERHEAD)
        self.decisions = counter("scheduling_decisions", "Decisions, by the pod that was chosen.", ("endpoint",))
        self.plugin_seconds = histogram(
            "plugin_duration_seconds",
            "One call of a plugin; one call in 16 is timed and counted.",
            ("extension_point", "plugin_type", "plugin_name"),
            OVERHEAD,
        )
        self.prediction_error = gauge(
            "latency_prediction_error_ratio",
            "Mean of |predicted - seen| over the mean of recent times to first token; 0 while fewer than 20 are known.",
        )
        self.predictions_trusted = gauge(
            "latency_predictions_trusted", "1, or 0 while latency-scorer scores without predictions, as they are bad."
        )
        self.scorer_faults = counter("scorer_faults", "Scores that were not usable.", ("plugin", "fault"))
        self.shadow = counter(
            "shadow_decisions", "Runs of shadow profiles, by whether they chose the same pod.", ("profile", "agrees")
        )
        self.attempts = counter("attempts", "Legs sent to pods, by how they ended.", ("endpoint", "ending"))
        self.retries = counter("retries", "Legs that were sent because an earlier one had failed.")

        # pods, read from the fleet for every exposition
        self.in_flight = gauge("endpoint_in_flight_requests", "Requests that kvlane has on the pod.", ("endpoint",))
        self.in_flight_tokens = gauge(
            "endpoint_in_flight_tokens", "Uncached prompt tokens sent and not answered yet.", ("endpoint",)
        )
        self.state = gauge("endpoint_state", "1 for the state the pod is in.", ("endpoint", "state"))
        self.waiting = gauge("endpoint_waiting_requests", "Queue of the pod, as scraped.", ("endpoint",))
        self.running = gauge("endpoint_running_requests", "Running requests of the pod, as scraped.", ("endpoint",))
        self.kv_usage = gauge("endpoint_kv_cache_usage_ratio", "Used share of the pod's KV cache.", ("endpoint",))
        self.scrape_age = gauge("endpoint_scrape_age_seconds", "Age of the pod's last good scrape.", ("endpoint",))
        self.scrape_failures = counter("endpoint_scrape_failures", "Scrapes of the pod that failed.", ("endpoint",))
        self.pool_waiting = gauge("pool_waiting_requests_mean", "Mean queue of the ready pods.")
        self.pool_kv_usage = gauge("pool_kv_cache_usage_ratio_mean", "Mean used share of the ready pods' KV caches.")
        self.pool_ready = gauge("pool_ready_endpoints", "Pods that are ready.")

        # kvlane itself
        self.loop_lag = gauge("event_loop_lag_seconds", "How late the last timer of the event loop was.")
        self.log_lines_lost = counter("access_log_lines_lost", "Access log lines that nobody read in time.")
        self.workers = gauge("workers", "Workers that serve, where there are several.")
        self.worker_restarts = counter("worker_restarts", "Workers that ended unasked and were replaced.")
        self.bus_dropped = counter("bus_dropped_frames", "Frames between workers that a slow reader made drop.")
        self.bus_garbled = counter("bus_garbled_frames", "Frames between workers that made no sense.")
        self.build = gauge("build_info", "1, labelled with what runs.", ("version", "python"))
        self.build.cell(version, platform.python_version()).value = 1

    def slices(self) -> Iterator[Metric]:
        """Everything there is, in pieces of about 200 samples; pieces of one family follow each other."""
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
