"""A budget for each test, and the tests that exceed it.

`make test` leaves the exceptions out. A run ends with a list of the other tests that are over budget. In tests/unit and
tests/wire the CPU time of the process counts, because wall-clock time depends on what else the machine does. The list
fails no run: CPU time depends on the machine too, and a busy one takes two or three times as much, so a limit that
fails would make tests depend on speed. The time of the loops cannot be the limit either, since skipped waits cost
nothing. Tests of random examples have no budget: the Hypothesis profile sets the number of examples.

Programs that tests start are not shared between tests: starting Redis takes 0.01 s of CPU and Envoy 0.08 s, and most of
these tests stop the program or configure it. The browser, which takes seconds, is shared by the tests of a module, and
tests/system/telemetry starts Prometheus once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

BUDGETS: dict[str, tuple[float, Callable[[], float]]] = {
    "tests/unit/": (0.05, time.process_time),
    "tests/wire/": (1.0, time.process_time),
    "tests/system/": (20.0, time.monotonic),
}
"""Seconds per test of a folder, and the clock that measures them."""

ALLOWANCE = 4
"""A test is listed from so many times its budget on: busy and slow machines take two or three times as long."""

EXCEPTIONS = {
    "tests/unit/autoscale/test_closed_loop.py": "simulates days of load",
    "tests/unit/bench/": "simulates fleets",
    "tests/unit/cli/test_replay.py": "replays records of many requests",
    "tests/unit/cli/test_schema.py::test_an_unknown_key_is_invalid": "tries every key of an example",
    "tests/unit/config/test_loading.py::test_any_text_gives_a_configuration": "loads many texts",
    "tests/unit/core/test_tasks.py::test_no_endless_coroutine": "parses every module of proxy/",
    "tests/unit/scheduling/test_explained_kept.py::test_memory_is_bounded": "measures memory of many decisions",
    "tests/unit/fleet/test_drain_affinity.py::test_documents_of_a_drained_pod": "simulates a fleet",
    "tests/unit/flowcontrol/test_queue.py::test_the_cost_of_an_arrival": "counts steps of long queues",
    "tests/unit/http/test_any_request.py": "parses every way to cut many requests",
    "tests/unit/openai/test_continuation.py::test_any_bytes_of_pods": "reads many streams",
    "tests/unit/plugins/test_candidate_sampling.py": "counts picks among thousands of pods",
    "tests/unit/plugins/test_contract.py::TestEveryScorer::test_scoring_twice_gives_the_same": "imports every plugin",
    "tests/unit/prefix/test_exact.py::test_memory": "measures memory of a large index",
    "tests/unit/prefix/test_index_against_naive.py": "compares long histories with a naive index",
    "tests/unit/prefix/test_memory.py": "measures memory of large indexes",
    "tests/unit/lab/": "replays and tunes records of many requests",
    "tests/unit/cluster/test_return.py::test_after_a_": "simulates replicas for minutes",
    "tests/unit/telemetry/test_exposition.py": "renders every series of a large fleet",
    "tests/unit/telemetry/test_observer.py::test_counting_in_batches": "compares the counts of many requests",
    "tests/unit/telemetry/test_observer.py::test_every_request_has_its_model": "counts many requests in batches",
    "tests/unit/telemetry/test_span_queue.py": "fills a queue of spans",
    "tests/unit/cluster/test_gc_tuning.py": "collects the garbage of the whole process",
    "tests/wire/bench/test_fuzz.py": "sends random input",
    "tests/wire/cli/test_commands.py::test_demo_as_json": "runs the demo in real time",
    "tests/wire/http/test_limits.py::test_a_body_in_many_small_reads": "measures memory of a large body",
    "tests/wire/http/test_send_timeout.py::test_a_client_that_reads_nothing": "fills the buffers of the kernel",
    "tests/wire/http/test_tls.py::test_failed_handshakes": "makes many handshakes",
    "tests/wire/scenarios/test_cycles.py": "collects garbage after many requests",
    "tests/wire/scenarios/test_fleet.py::test_changes_of": "keeps a fleet under load while a file changes",
    "tests/wire/scenarios/test_kubernetes_changes.py": "keeps a fleet under load while the cluster changes",
    "tests/wire/scenarios/test_reload.py::test_no_request_or_stream": "reloads under load",
}
"""The first part of the names of tests that may exceed their budget, and what takes the time."""


class Budget:
    """A pytest plugin that marks the exceptions as `long` and lists the other tests that are over budget."""

    def __init__(self) -> None:
        self._over: list[tuple[float, float, str]] = []

    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if item.nodeid.startswith(tuple(EXCEPTIONS)):
                item.add_marker("long")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        for folder, (seconds, clock) in BUDGETS.items():
            is_free = item.get_closest_marker("long") or item.get_closest_marker("hypothesis")
            if item.nodeid.startswith(folder) and not is_free:
                began = clock()
                try:
                    yield
                finally:
                    if clock() - began > ALLOWANCE * seconds:
                        item.user_properties.append(("over budget", (clock() - began, seconds)))
                return
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == "over budget":
                    self._over.append((*value, report.nodeid))  # type: ignore[misc]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._over:
            terminalreporter.section("over budget (tests/helpers/budget.py)")
            for taken, seconds, name in sorted(self._over, reverse=True):
                terminalreporter.write_line(f"{taken:.2f} s instead of {seconds:g} s: {name}")
