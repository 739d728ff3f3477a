from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from proxy.telemetry.metrics import PREFIX
from proxy.telemetry.observation import Exposition, expose
from tests.helpers.telemetry.fakes import World

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


async def crowded() -> World:
    """More pods and models than fit into one slice of a family."""
    world = World()
    for number in range(1100):
        endpoint = world.fleet.add(f"pod-{number}")
        world.request(world.attempt_of(endpoint, model=f'model "{number % 50}"\\\n'))
    world.observer.flush()
    await world.series.read()
    return world


async def test_the_text_format_has_one_head_per_family() -> None:
    world = await crowded()
    body, content_type = await expose(world.catalogue, "")
    families = {family.name: family for family in parse_text(body.decode())}
    assert content_type.startswith("text/plain; version=0.0.4")
    assert len(families["kvlane_endpoint_in_flight_requests"].samples) == 1001
    assert len(families["kvlane_prompt_tokens"].samples) == 50
    assert body.count(b"# TYPE kvlane_endpoint_in_flight_requests ") == 1
    assert body.count(b"# TYPE kvlane_time_per_output_token_seconds ") == 1


async def test_openmetrics_is_negotiated() -> None:
    body, content_type = await expose((await crowded()).catalogue, OPENMETRICS)
    families = {family.name for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    assert body.count(b"# EOF") == 1
    assert "kvlane_time_to_first_token_seconds" in families


@pytest.mark.parametrize("accept", ["application/openmetrics-text;version=x", "text/plain;version=;;", "*/*", ",,;="])
async def test_an_unknown_accept_header_gets_the_text_format(accept: str) -> None:
    body, _ = await expose(World().catalogue, accept)
    assert b"kvlane_build_info" in body


async def test_every_series_of_kvlane_has_its_prefix_and_a_help() -> None:
    body, _ = await expose(World().catalogue, "")
    heads = [line.split(" ", 3) for line in body.decode().splitlines() if line.startswith("# HELP")]
    assert all(head[2].startswith((PREFIX, "process_")) for head in heads)
    assert all(len(head[3]) > 10 for head in heads)
    assert len({head[2] for head in heads}) == len(heads)


async def test_the_catalogue_lists_exactly_the_exposed_samples() -> None:
    world = await crowded()
    world.observer.plugin_fault("s", "nan")
    body, _ = await expose(world.catalogue, "")
    exposed = {sample.name for family in parse_text(body.decode()) for sample in family.samples}
    assert {name for name in exposed if name.startswith(PREFIX)} <= set(world.catalogue.sample_names)


async def test_the_event_loop_runs_while_a_large_exposition_is_rendered() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.get_running_loop().create_task(count())
    await expose((await crowded()).catalogue, "")
    counting.cancel()
    assert turns > 30


def test_no_step_of_an_exposition_grows_with_the_fleet() -> None:
    assert longest_step(pods=500) <= 1.1 * longest_step(pods=250)


def longest_step(pods: int) -> int:
    """Calls, of Python and of C, that an exposition makes between two turns of the event loop, at most."""
    world = World()
    for number in range(pods):
        world.request(world.attempt_of(world.fleet.add(f"pod-{number}")))
    calls, steps = itertools.count(), [0]
    rendering = world.exposition.render("")
    with contextlib.suppress(StopIteration):
        while True:
            sys.setprofile(lambda frame, event, argument: next(calls) if event.endswith("call") else None)
            try:
                rendering.send(None)
            finally:
                sys.setprofile(None)
                steps.append(next(calls))
    return max(later - earlier for earlier, later in itertools.pairwise(steps))


async def test_build_info_is_exposed() -> None:
    body, _ = await expose(World().catalogue, "")
    assert b'version="1.2.3"' in body


async def test_two_concurrent_scrapes_see_the_same() -> None:
    world = World()
    for number in range(600):
        world.fleet.add(f"pod-{number}").charge(1, 0)
    exposition = Exposition(world.catalogue, world.series)
    bodies = await asyncio.gather(exposition.render(""), exposition.render(""), exposition.render(""))
    for body, _ in bodies:
        assert body.count(b"kvlane_endpoint_in_flight_requests{") == 600
        assert body.count(b"} 2.0\n") == 0
