from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from bench.placement import routers, sockets
from bench.placement.client import ask
from bench.placement.experiment import Experiment
from bench.placement.generators import generate
from bench.placement.scenario import Scenario
from bench.rig import Program, Site
from proxy.lab.sim import SimConfig, SimPod
from proxy.lab.simulation import Restart
from proxy.lab.workload import Job, named

NOWHERE = Path("/nonexistent")
FAST = [SimConfig(num_gpu_blocks=4_000)] * 2


def kvlane(slower: float = 1.0) -> Program:
    return routers.program("default", slower, NOWHERE)


def test_all_requests_over_sockets_complete_and_their_hits_are_counted() -> None:
    jobs = generate("conversations", 60, 30.0, Random(3)).jobs
    played = sockets.play(kvlane(), jobs, FAST, 1.0)
    assert all(one.ended is not None for one in played.outcomes)
    assert {one.pod for one in played.outcomes} == {0, 1}
    assert all(one.job.arrival < (one.first_token or 0) <= (one.ended or 0) for one in played.outcomes)
    assert sum(one.cached_tokens for one in played.outcomes) > 0
    assert played.hit_predicted is not None
    assert played.gauges.samples > 0
    assert len(played.late) == 60


def test_a_restarted_pod_loses_its_running_requests() -> None:
    jobs = named([Job(0.0, 100, 200, (at,)) for at in range(4)] + [Job(2.0, 100, 2, (9,))])
    played = sockets.play(kvlane(), jobs, FAST, 1.0, [Restart(0, at=0.6, down=0.2)])
    lost = Counter(one.ended is None for one in played.outcomes[:4])
    assert lost == {True: 2, False: 2}
    assert played.outcomes[4].ended is not None


def test_the_log_of_a_router_that_does_not_start_is_shown(tmp_path: Path) -> None:
    def command(site: Site) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('out of order')"]

    with pytest.raises(SystemExit, match="out of order"), routers.started(Program("broken", command), [1], tmp_path):
        pass


def test_requests_with_a_recorded_choice_go_straight_to_the_pods() -> None:
    jobs = named([Job(0.05 * at, 100, 2, (at % 3,)) for at in range(12)])
    pods = [0, 1, 1] * 4
    played = sockets.play(routers.Given("oracle", pods), jobs, FAST, 1.0)
    assert [one.pod for one in played.outcomes] == pods
    assert all(one.ended is not None for one in played.outcomes)
    assert [one.cached_tokens > 0 for one in played.outcomes] == [False] * 3 + [True] * 9


def test_the_oracle_chooses_on_the_virtual_clock_for_pods_behind_sockets() -> None:
    experiment = Experiment(Scenario(pods=2), generator="shared-prompt", requests=30, seeds=1, known_capacity=30.0)
    found = experiment.over_sockets("oracle", 1.0, 0, 1.0, NOWHERE)
    assert found["failed"] == 0
    assert found["hit"] == pytest.approx(experiment.virtual("oracle", 1.0, 0)["hit"], abs=0.1)


def test_recorded_choices_are_refused_with_restarting_pods() -> None:
    scenario = Scenario(pods=2, restart_at=1.0)
    experiment = Experiment(scenario, generator="shared-prompt", requests=30, seeds=1, known_capacity=30.0)
    with pytest.raises(routers.NoSuchRouter, match="--virtual"):
        experiment.over_sockets("oracle", 1.0, 0, 1.0, NOWHERE)


def test_a_missing_peer_is_reported_with_its_installation() -> None:
    with pytest.raises(SystemExit, match="pip install"):
        routers.program("vllm-router", 1.0, NOWHERE)


BODY = b'{"model":"sim","stream":true,"max_tokens":3,"prompt":"abcd","stream_options":{"include_usage":true}}'


async def test_a_response_is_timed_and_its_usage_read() -> None:
    async with SimPod(SimConfig(time_scale=20)) as pod:
        response = await ask(pod.port, "/v1/completions", BODY, "a session")
        assert response.whole
        assert response.cached_tokens == 0
        assert response.sent < (response.first or 0) < (response.last or 0)
        assert pod.requests[0].headers["x-session-id"] == "a session"


async def test_a_refused_or_truncated_response_is_not_complete() -> None:
    async with SimPod() as pod:
        refused = await ask(pod.port, "/v1/completions", BODY.replace(b"sim", b"other"))
        assert (refused.status, refused.whole) == (404, False)
        cut = asyncio.ensure_future(ask(pod.port, "/v1/completions", BODY.replace(b":3", b":2000")))
        while not pod.engine.running:
            await asyncio.sleep(0.01)
        await pod.kill()
        assert not (await cut).whole
        refused_connection = await ask(pod.port, "/v1/completions", BODY)
        assert (refused_connection.status, refused_connection.whole) == (0, False)


def test_sums_of_series_are_read_from_an_exposition() -> None:
    text = b'# HELP a b\na_total{x="1 2"} 3.0\na_total{x="2"} 4\nb 1e3\n'
    assert sockets.totals(text) == {"a_total": 7.0, "b": 1000.0}
