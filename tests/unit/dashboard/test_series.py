from __future__ import annotations

import orjson

from proxy.dashboard.samples import Series, Totals
from proxy.telemetry.metrics import Catalogue, Merged, dump_of


def counted() -> Catalogue:
    catalogue = Catalogue("test")
    for seconds in (0.03, 0.3, 0.31, 7.0, 5000.0):
        catalogue.ttft.cell("a", "true").observe(seconds)
        catalogue.ttft.cell('quoted "b", with a comma', "false").observe(2 * seconds)
    catalogue.requests.cell("a", "chat", "complete", "2xx").add(7)
    catalogue.requests.cell("a", "chat", "complete", "5xx").add(2)
    catalogue.requests.cell("a", "chat", "upstream-failed", "5xx").add(3)
    catalogue.requests.cell("a", "chat", "client-gone", "4xx").add(1)
    catalogue.requests.cell("", "chat", "refused", "4xx").add(5)
    catalogue.refused.cell("rate-limited").add(5)
    catalogue.shadow.cell("p", "true").add(4)
    catalogue.shadow_regret.cell("p", "live").observe(0.5)
    return catalogue


async def merged(*catalogues: Catalogue) -> Merged:
    found = Merged(Catalogue("test"))
    for number, catalogue in enumerate(catalogues):
        dump = orjson.loads(orjson.dumps(dump_of(catalogue.all_families)))
        await found.add(dump, str(number))
    return found


async def test_metrics_that_a_worker_sends_are_read_like_its_own() -> None:
    of_process, of_worker = Series(counted().families), Series((await merged(counted())).all_families)
    assert Totals.of(of_process, 1.0) == Totals.of(of_worker, 1.0)
    assert of_process.by("shadow_decisions", "profile", "agrees") == {("p", "true"): 4.0}
    for name, labels in (("shadow_decisions", ("profile", "agrees")), ("refused", ("reason",))):
        assert of_process.by(name, *labels) == of_worker.by(name, *labels)
    assert of_process.masses("shadow_regret_seconds", "sooner") == of_worker.masses("shadow_regret_seconds", "sooner")


async def test_workers_are_summed() -> None:
    series = Series((await merged(counted(), counted())).all_families)
    assert series.by("refused", "reason") == {("rate-limited",): 10.0}
    assert series.buckets("time_to_first_token_seconds")[-1][1] == 20.0


def test_errors_of_pods_are_failures_also_if_kvlane_rendered_them() -> None:
    counts = Totals.of(Series(counted().families), 1.0).counts
    assert (counts["good"], counts["failed"], counts["gone"], counts["refused"]) == (7, 5, 1, 5)
