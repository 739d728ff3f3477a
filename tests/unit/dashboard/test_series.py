from __future__ import annotations

from proxy.dashboard.samples import NAMES, CatalogueSeries, TextSeries, Totals
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import expose


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


async def test_what_workers_have_written_down_is_read_as_the_cells_are() -> None:
    catalogue = counted()
    text, _ = await expose(catalogue, "")
    of_cells, of_text = CatalogueSeries(catalogue), TextSeries([text], NAMES)
    assert Totals.of(of_cells, 1.0).counts == Totals.of(of_text, 1.0).counts
    assert list(of_cells.buckets("time_to_first_token_seconds")) == of_text.buckets("time_to_first_token_seconds")
    assert of_cells.by("shadow_decisions", "profile", "agrees") == of_text.by("shadow_decisions", "profile", "agrees")
    assert of_cells.masses("shadow_regret_seconds", "sooner") == of_text.masses("shadow_regret_seconds", "sooner")


async def test_workers_are_added_up() -> None:
    text, _ = await expose(counted(), "")
    assert TextSeries([text, text], NAMES).by("refused", "reason") == {("rate-limited",): 10.0}
    assert TextSeries([text, text], NAMES).buckets("time_to_first_token_seconds")[-1][1] == 20.0


def test_errors_of_pods_are_failures_whoever_rendered_them() -> None:
    counts = Totals.of(CatalogueSeries(counted()), 1.0).counts
    assert (counts["good"], counts["failed"], counts["gone"], counts["refused"]) == (7, 5, 1, 5)
